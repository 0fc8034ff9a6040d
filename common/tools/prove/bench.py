"""The test bench: launches observed runs of a recipe, and keeps what they wrote for all checks."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.tools.prove.observation import Manner, ObservedRun
from common.tools.recipe import Recipe


@dataclass(frozen=True)
class Interruption:
    """Where a launch is interrupted: at the first chance from update `step` on."""

    manner: Manner
    step: int
    # Of an evaluation or a save: which share of its batches or files has passed, from 0 to 1.
    share: float = 0.5


@dataclass(frozen=True)
class RunSpec:
    """An observed run that a check asks for. Equal specifications share one run."""

    name: str  # of its folder, such as "reference"
    flags: tuple[str, ...] = ()  # words that take the place of the proof's own flags
    processes: int = 1
    # Modules with a function `install(session)`, which the probe calls before the recipe runs. See
    # `common.tools.prove.session.Session`.
    instruments: tuple[str, ...] = ()
    # Whether the usual observers run. They read every tensor, so they wait for the device.
    is_observed: bool = True
    interruptions: tuple[Interruption, ...] = ()  # one for each launch before the last one
    # The number of processes of the launches after the first one; None: the same number.
    resumed_processes: int | None = None
    environment: tuple[tuple[str, str], ...] = ()


class Bench:
    """Runs a recipe as its user would, with few samples, and caches the observed runs.

    Checks read `recipe`, `flags` and `objective`, and call `run`.
    """

    recipe: Recipe
    folder: Path  # of the whole proof
    batch_size: int  # of a micro-batch, in the reference run
    accumulation: int  # in the reference run

    def run(self, spec: RunSpec) -> ObservedRun:
        """Return the observed run of a specification; launch it unless that was done before.

        Raises:
            RunFailedError: a launch did not end as it should. The message has the last lines.
        """
        raise NotImplementedError

    @property
    def reference(self) -> ObservedRun:
        """The uninterrupted run on one process, with the flags of the proof."""
        return self.run(RunSpec("reference"))

    def draws(self, name: str) -> random.Random:
        """Return a random generator for a check, which depends on the proof's seed alone."""
        raise NotImplementedError


class RunFailedError(Exception):
    """A run of the proof did not end as it should. The check that asked for it fails."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a check."""

    passed: bool | None  # None: the check does not apply to this recipe
    compared: str  # what was compared, with numbers, such as "40 updates, 14 rows, 6 tensors"
    causes: tuple[str, ...] = ()  # what is wrong, and where; the likeliest cause first
    advice: str = ""  # what to change in the recipe


@dataclass(frozen=True)
class Check:
    """A question about a recipe."""

    name: str  # for `--checks`
    question: str  # one sentence that says what is compared with what
    answer: Callable[[Bench], Verdict]
    # Whether the check runs only if `--checks` names it, such as one that needs several GPUs.
    is_optional: bool = False
