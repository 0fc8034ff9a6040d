"""The wording of a verdict on the objective: by how much a group is better."""

import math
from typing import NamedTuple

from common.objective import Objective
from common.system.wording import counted
from common.tools.compare.repetition_text import (
    confidence_interval_text,
    have_equal_means,
    not_distinguishable_text,
)
from common.tools.statistics.contrasts import Contrast
from common.tools.statistics.samples import (
    ConfidenceInterval,
    Sample,
)
from common.track.names import is_proportion, metric_named

MAX_DECIMALS = 6


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
    objective: Objective,
    baseline: Sample,
    group: Sample,
    baseline_error: float | None,
    group_error: float | None,
) -> str:
    """Return the text on the objective if a group has only one seed.

    The text has both values and advice to repeat runs, but no verdict: one seed does not show how
    much the objective varies by chance.

    Args:
        baseline_error: the standard error of the baseline from its number of samples; None if
            unknown.
        group_error: the same of the group.
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
    if baseline_error is None or group_error is None:
        return f"{values} {seeds}: {advice}"
    errors = f"{metric.text(group_error)} and {metric.text(baseline_error)}"
    return f"{values} {seeds} (standard errors of the samples {errors}): {advice}"


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
    direction = "worse" if gain < 0 else "better"
    size = f"{abs(gain):{form}}"
    if size == "1":
        unit = unit.replace(" points", " point")
    return f"{size}{unit} {direction}"


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
