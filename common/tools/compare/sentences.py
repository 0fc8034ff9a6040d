"""The wording of a verdict: by how much a group is better, or how many runs could show it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from common.objective import Objective
from common.system.wording import counted
from common.tools.statistics.contrasts import Contrast
from common.tools.statistics.samples import (
    MAX_RUNS,
    ConfidenceInterval,
    Sample,
    are_equal_apart_from_rounding,
)
from common.track.names import is_proportion, metric_named

MAX_DECIMALS = 6
MAX_EXPONENT = 700.0  # float64 ends at about e to the power of 709

# ------------------------------------------------------------------------------- The objective


class ShownInterval(NamedTuple):
    """The interval of a gain, as a sentence shows it."""

    form: str  # the format of its limits, which the sentence also uses for the gain
    text: str  # such as "95 % interval 0.12 to 0.45"


def difference_text(
    objective: Objective,
    baseline: Sample,
    group: Sample,
    contrast: Contrast,
) -> str:
    """Return the verdict on the objective of two groups of several seeds each.

    Args:
        objective: says which direction is better.
        baseline: the baseline's values, at least two.
        group: the group's values, at least two.
        contrast: the group's difference from the baseline; without an interval if neither group's
            values vary.
    """
    gain = gain_of(objective, baseline, group)
    interval = contrast.interval
    if interval is None:
        if have_equal_means(baseline, group):
            return "equal in all runs"
        return (
            f"{gain_text(objective, gain, '.3g')}; there is no interval, because all seeds of a "
            "group have equal values"
        )
    form, span = shown_interval(objective, abs(gain), interval)
    if contrast.is_paired:
        span += ", paired by seed"
    if interval.excludes_zero:
        return f"{gain_text(objective, gain, form)} ({span})"
    return (
        f"{not_distinguishable_text(baseline, group, contrast.runs_needed, 'seed')} "
        f"({gain_text(objective, gain, form)}, {span})"
    )


def difference_text_of_single_seeds(
    objective: Objective, baseline: Sample, group: Sample, errors: Sequence[float | None]
) -> str:
    """Return the text on the objective if a group has only one seed.

    The text has both values and advice to repeat runs, but no verdict: one seed does not show how
    much the objective varies by chance.

    Args:
        errors: the standard errors of the baseline and of the group from their number of samples;
            None if unknown.
    """
    metric = metric_named(objective.metric)
    values = f"{metric.text(group.mean)} against {metric.text(baseline.mean)}"
    if baseline.count == group.count:
        seeds = "with one seed each"
        advice = "repeat both with several seeds to tell which is better"
    else:
        group_seeds = counted(group.count, "seed")
        baseline_seeds = counted(baseline.count, "seed")
        seeds = f"with {group_seeds} against {baseline_seeds}"
        advice = "repeat the single one with other seeds to tell which is better"
    if None in errors:
        return f"{values} {seeds}: {advice}"
    error_texts = " and ".join(metric.text(error) for error in reversed(errors))
    return f"{values} {seeds} (standard errors of the samples {error_texts}): {advice}"


def shown_interval(
    objective: Objective, gain: float, interval: ConfidenceInterval
) -> ShownInterval:
    """Return the interval around a gain, with two digits of its half-width.

    Args:
        gain: at least 0, in the unit of `scale_of`.
        interval: that of the difference from which the gain comes, in the objective's own unit.
    """
    scale, _ = scale_of(objective)
    half_width = scale * (interval.high - interval.low) / 2
    form = f".{decimals_for(half_width)}f"
    low = gain - half_width
    high = gain + half_width
    return ShownInterval(form, confidence_interval_text(interval.confidence, low, high, form))


def gain_of(objective: Objective, baseline: Sample, group: Sample) -> float:
    """Return how much better the group's mean is, in the unit of `scale_of`."""
    assert baseline.mean is not None
    assert group.mean is not None
    scale, _ = scale_of(objective)
    return objective.sign * scale * (group.mean - baseline.mean)


def gain_text(objective: Objective, gain: float, form: str) -> str:
    """Return a gain such as "0.40 points better", or "0.40 points worse" for a negative gain."""
    _, unit = scale_of(objective)
    return f"{abs(gain):{form}}{unit} {'worse' if gain < 0 else 'better'}"


def scale_of(objective: Objective) -> tuple[float, str]:
    """Return the factor and the unit in which differences of an objective are shown."""
    if is_proportion(objective.metric):
        return 100.0, " points"
    unit = metric_named(objective.metric).unit
    return 1.0, f" {unit}" if unit else ""


def decimals_for(half_width: float) -> int:
    """Return the number of decimals that show two digits of an interval's half-width.

    It is at most `MAX_DECIMALS`, and 2 for a half-width that is 0 or not finite.
    """
    if not 0 < half_width < math.inf:
        return 2
    return min(max(1 - math.floor(math.log10(half_width)), 0), MAX_DECIMALS)


# ------------------------------------------------------------------------------ The throughput


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
    """Return the interval of a ratio of rates, from that of the difference of their logarithms."""
    low = exponential(interval.low)
    high = exponential(interval.high)
    return confidence_interval_text(interval.confidence, low, high, ".2f")


def exponential(value: float) -> float:
    """Return e to the power of a value; infinity where float64 ends."""
    return math.exp(value) if value < MAX_EXPONENT else math.inf


# --------------------------------------------------------------------------------------- Both


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
