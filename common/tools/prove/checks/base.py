"""The class of all checks."""

from collections.abc import Callable
from dataclasses import dataclass

from common.tools.prove.proof_runs.bench import Bench
from common.tools.prove.verdicts import Verdict


@dataclass(frozen=True)
class Check:
    """A check of one guarantee."""

    name: str  # the name for `--checks`
    question: str  # the guarantee, in one sentence
    run: Callable[[Bench], Verdict]
    # Whether the check compares runs or processes, which differ if the recipe is not repeatable.
    compares_runs: bool = False
    # Whether the check runs only if `--checks` names it.
    is_optional: bool = False
