"""The difference of two groups of runs: its interval, and the runs that would show it.

Runs of two groups with the same seed may share chance: they begin with the same weights, and see
the samples in the same order. The differences between such runs then vary less than the runs do.
So if both groups have the same seeds, their runs are compared in pairs. This is right whether or
not they share chance; if they do not, the interval is a little wider than Welch's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from common.tools.statistics.samples import (
    LARGEST_ROUNDING,
    ConfidenceInterval,
    Sample,
    paired_interval,
    pairs_needed,
    runs_needed,
    welch_interval,
)

# With two pairs, Student's t has one degree of freedom, and hardly any difference is found.
MIN_PAIRS = 3


@dataclass(frozen=True)
class Contrast:
    """The difference of two groups: the second group's mean minus the first group's."""

    interval: ConfidenceInterval | None  # None if there are too few values, or if they do not vary
    # The runs per group that would show a difference as large as this one; None: see `runs_needed`.
    runs_needed: int | None
    is_paired: bool  # whether runs with equal seeds were compared


def contrast_by_seeds(
    first: Mapping[str, float], second: Mapping[str, float], confidence: float
) -> Contrast:
    """Compare two groups in pairs if they have the same seeds, and by Welch's interval otherwise.

    Pairs whose differences are all equal, apart from rounding, show no chance, so Welch's interval
    judges them.

    Args:
        first: the first group's finite values, by seed.
        second: the second group's finite values, by seed.
    """
    if first.keys() == second.keys() and len(first) >= MIN_PAIRS:
        differences = Sample.of([second[seed] - value for seed, value in first.items()])
        largest_value = max(map(abs, [*first.values(), *second.values()]))
        if (differences.deviation or 0.0) > LARGEST_ROUNDING * largest_value:
            interval = paired_interval(differences, confidence)
            needed = pairs_needed(differences, confidence)
            if needed is not None:
                needed = max(needed, MIN_PAIRS)
            return Contrast(interval, needed, is_paired=True)
    first_sample = Sample.of([*first.values()])
    second_sample = Sample.of([*second.values()])
    return welch_contrast(first_sample, second_sample, confidence)


def welch_contrast(first: Sample, second: Sample, confidence: float) -> Contrast:
    """Compare two groups of independent values."""
    interval = welch_interval(first, second, confidence)
    return Contrast(interval, runs_needed(first, second, confidence), is_paired=False)
