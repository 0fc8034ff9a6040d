"""The wording of a verdict on the throughput: how many times as fast a group is."""

import math

from common.system.wording import counted
from common.tools.compare.repetition_text import (
    confidence_interval_text,
    not_distinguishable_text,
)
from common.tools.statistics.contrasts import Contrast
from common.tools.statistics.samples import (
    ConfidenceInterval,
    Sample,
)

MAX_EXPONENT = 700.0  # float64 ends at about e to the power of 709


def ratio_text(baseline: Sample, group: Sample, contrast: Contrast) -> str:
    """Return the verdict on the throughput of two groups of several runs each.

    Args:
        baseline: logarithms of the baseline's rates, at least two.
        group: logarithms of the group's rates, at least two.
        contrast: the difference of the logarithms; without an interval if neither group's rates
            vary.
    """
    interval = contrast.interval
    times = f"{ratio_of_rates(baseline, group):.2f} ×"
    if interval is None:
        return f"{times} as fast; there is no interval, because all runs of a group are equal"
    if interval.excludes_zero:
        return f"{times} as fast ({ratio_span_text(interval)})"
    return (
        f"{not_distinguishable_text(baseline, group, contrast.runs_needed, 'run')} "
        f"({times}, {ratio_span_text(interval)})"
    )


def ratio_text_of_single_runs(
    baseline: Sample, group: Sample, interval: ConfidenceInterval | None
) -> str:
    """Return the text on the throughput if a group has only one run.

    Args:
        interval: that of the log lines within one run of each group; None if they are too few. If a
            run has stalled between a few lines, it need not contain the ratio of the whole runs.
    """
    ratio = ratio_of_rates(baseline, group)
    times = f"{ratio:.2f} × as fast"
    if baseline.count == group.count:
        times += ", in single runs"
        advice = "repeat both to see how much runs differ by chance"
    else:
        times += f", in {counted(group.count, 'run')} against {counted(baseline.count, 'run')}"
        advice = "repeat the single one to see how much runs differ by chance"
    if interval is None:
        return f"{times}: {advice}"
    span = ratio_span_text(interval)
    if not is_shown_within(ratio, interval):
        lines = f"{exponential(interval.difference):.2f} × at the mean log line"
        if baseline.count == group.count:
            return f"{times}, but a run was not steady: {lines} ({span}): {advice}"
        # The speeds of a group's runs may differ although each run was steady.
        return f"{times}, but {lines} of each group's first run ({span}): {advice}"
    span = f"{span} by the log lines within the runs"
    if interval.excludes_zero:
        return f"{times} ({span}): {advice}"
    return f"{times}, which even their log lines do not distinguish ({span}): {advice}"


def is_shown_within(ratio: float, interval: ConfidenceInterval) -> bool:
    """Return whether a ratio of rates is in an interval, with the two decimals that a text shows.

    The intervals of very steady runs are narrower than a hundredth, and then the ratio of the whole
    runs differs from that of their lines by rounding alone.

    Args:
        interval: that of the logarithm of the ratio.
    """
    low = round(exponential(interval.low), 2)
    high = round(exponential(interval.high), 2)
    return low <= round(ratio, 2) <= high


def ratio_of_rates(baseline: Sample, group: Sample) -> float:
    """Return the ratio of two rates from the means of their logarithms."""
    assert baseline.mean is not None
    assert group.mean is not None
    return exponential(group.mean - baseline.mean)


def ratio_span_text(interval: ConfidenceInterval) -> str:
    """Return the interval of a ratio of two rates.

    Args:
        interval: that of the difference of their logarithms.
    """
    low = exponential(interval.low)
    high = exponential(interval.high)
    return confidence_interval_text(interval.confidence, low, high, ".2f")


def exponential(value: float) -> float:
    """Return e to the power of a value; infinity where float64 ends."""
    return math.exp(value) if value < MAX_EXPONENT else math.inf
