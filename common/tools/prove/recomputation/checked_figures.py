"""The figures of a proof: mistakes in them, and which of them were computed again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from common.objective import PREFIXES
from common.tools.prove.verdicts import Cause

FigureType = Literal[
    "recorded losses",  # losses that the loop recorded
    "recorded metrics",  # metrics that the loop recorded
    "figures of evaluations",
    "means in rows",  # means in the rows of metrics.jsonl
    "speeds",  # logged speeds
]
FIGURE_TYPES: tuple[FigureType, ...] = get_args(FigureType)
# The types that are computed again from a model's outputs.
TYPES_FROM_OUTPUTS: tuple[FigureType, ...] = (
    "recorded losses",
    "recorded metrics",
    "figures of evaluations",
)


@dataclass(frozen=True)
class CheckedFigures:
    """The mistakes in the figures of one type in one run, and the number of these figures.

    The names are those of the log, such as "val/accuracy". Means in rows and speeds need none.
    """

    figure_type: FigureType
    causes: tuple[Cause, ...] = ()  # the mistakes
    compared_count: int = 0  # of figures that were computed again
    compared_names: frozenset[str] = frozenset()
    unknown_names: frozenset[str] = frozenset()  # of figures that could not be computed again


def has_outcomes(checked: Sequence[CheckedFigures]) -> bool:
    """Whether a loss, metric or evaluation was computed again from a model's outputs.

    If not, the check `figures` proves nothing about them, so it does not apply.
    """
    return any(
        figures.compared_count for figures in checked if figures.figure_type in TYPES_FROM_OUTPUTS
    )


def coverage_in_words(checked: Sequence[CheckedFigures], objective_metric: str) -> str:
    """Return in words how many figures were computed again, and the names of those that were not.

    Args:
        objective_metric: the metric of the objective, without a prefix such as "val/".
    """
    counts: Counter[FigureType] = Counter()
    compared_names: set[str] = set()
    unknown_names: set[str] = set()
    for figures in checked:
        counts[figures.figure_type] += figures.compared_count
        compared_names |= figures.compared_names
        unknown_names |= figures.unknown_names
    text = f"computed again: {counts_in_words(counts) or 'nothing'}"
    unchecked_names = unknown_names - compared_names
    if unchecked_names:
        names = ", ".join(sorted(unchecked_names))
        text += f"; not checked, as the proof can't tell how to compute them: {names}"
    partly_checked_names = unknown_names & compared_names
    if partly_checked_names:
        text += f"; checked only in part: {', '.join(sorted(partly_checked_names))}"
    objective_names = {f"{prefix}/{objective_metric}" for prefix in PREFIXES.values()}
    if objective_names & unchecked_names and not objective_names & compared_names:
        text += f"; so this check says nothing about the objective, {objective_metric}"
    return text


def counts_in_words(counts: Mapping[FigureType, int]) -> str:
    """Return the counts above 0 with their types, such as "12 recorded losses, 3 speeds"."""
    phrases = []
    for figure_type in FIGURE_TYPES:
        if counts[figure_type]:
            phrases.append(f"{counts[figure_type]} {figure_type}")
    return ", ".join(phrases)
