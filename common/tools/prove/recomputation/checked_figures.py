"""The figures of a proof: mistakes in them, and how many of them were computed again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
    """The mistakes in the figures of one type in one run, and the number of these figures."""

    figure_type: FigureType
    causes: tuple[Cause, ...] = ()  # the mistakes
    compared_count: int = 0  # of figures that were computed again
    unknown_count: int = 0  # of figures that could not be computed again


def has_outcomes(checked: Sequence[CheckedFigures]) -> bool:
    """Whether a loss, metric or evaluation was computed again from a model's outputs.

    If not, the check `figures` proves nothing about them, so it does not apply.
    """
    return any(
        figures.compared_count for figures in checked if figures.figure_type in TYPES_FROM_OUTPUTS
    )


def numbers_in_words(checked: Sequence[CheckedFigures]) -> str:
    """Return in words how many figures were computed again, and how many were not."""
    compared: Counter[FigureType] = Counter()
    unknown: Counter[FigureType] = Counter()
    for figures in checked:
        compared[figures.figure_type] += figures.compared_count
        unknown[figures.figure_type] += figures.unknown_count
    text = f"computed again: {counts_in_words(compared) or 'nothing'}"
    unknown_figures = counts_in_words(unknown)
    if unknown_figures:
        reason = "as the proof can't tell how to compute them"
        text += f"; not computed again, {reason}: {unknown_figures}"
    return text


def counts_in_words(counts: Mapping[FigureType, int]) -> str:
    """Return the counts above 0 with their types, such as "12 recorded losses, 3 speeds"."""
    phrases = []
    for figure_type in FIGURE_TYPES:
        if counts[figure_type]:
            phrases.append(f"{counts[figure_type]} {figure_type}")
    return ", ".join(phrases)
