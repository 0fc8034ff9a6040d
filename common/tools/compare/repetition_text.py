"""The words for what repetitions show: an interval, or that groups are not distinguishable."""

from common.tools.statistics.samples import (
    MAX_RUNS,
    Sample,
    are_equal_apart_from_rounding,
)


def not_distinguishable_text(baseline: Sample, group: Sample, needed: int | None, noun: str) -> str:
    """Return that two groups are not distinguishable, and how many repetitions could show more.

    Args:
        baseline: the baseline's values.
        group: the group's values.
        needed: the repetitions per group that could show such a difference; see `runs_needed`.
        noun: the word for a repetition, "seed" or "run".
    """
    counts = f"n = {baseline.count}"
    if baseline.count != group.count:
        counts += f" and {group.count}"
    if needed is None and have_equal_means(baseline, group):
        return f"not distinguishable with {counts}; the means are equal"
    if needed is None:
        return f"not distinguishable with {counts}; not even {MAX_RUNS:,} {noun}s each would do"
    return f"not distinguishable with {counts}; about {needed:,} {noun}s each would be needed"


def confidence_interval_text(confidence: float, low: float, high: float, form: str) -> str:
    """Return an interval as text, such as "95 % interval 0.12 to 0.45"."""
    return f"{percent(confidence)} interval {low:{form}} to {high:{form}}"


def have_equal_means(baseline: Sample, group: Sample) -> bool:
    """Return whether the means of two groups, each with a value, differ by rounding at most."""
    assert baseline.mean is not None
    assert group.mean is not None
    return are_equal_apart_from_rounding(baseline.mean, group.mean)


def percent(confidence: float) -> str:
    """Return a confidence as text, such as "95 %", or "98.3 %" where it was corrected."""
    return f"{100 * confidence:.3g} %"
