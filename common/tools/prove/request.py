"""The request for a proof, as the command line makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProofRequest:
    """The recipe to prove, and how."""

    recipe: Path
    flags: Sequence[str]  # the recipe's flags, as words of a command line
    checks: str | None  # comma-separated names; None: all checks that are not optional
    skipped_checks: str | None  # comma-separated names; None: leave out no check
    output: Path  # the file of the receipt
    folder: Path | None  # the folder that keeps the runs; None: a temporary folder
    seed: int  # the seed of the random interruption points
    updates: int  # the number of updates of a training
