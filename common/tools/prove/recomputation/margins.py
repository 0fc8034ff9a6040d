"""How much an objective has to improve, so that chance alone rarely explains the improvement.

A model that guesses improves in half of all evaluations. So an improvement counts only if it
exceeds a margin of two standard errors, or of two and a half in a second, longer run.

If the outcomes of the samples are known, the standard error comes from the differences of single
samples. Such a paired comparison detects smaller improvements. Otherwise the standard error of a
share of samples comes from the binomial distribution. Other figures have to improve by a share of
their value before training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.objective import Objective
from common.tools.prove.recomputation.evaluation_figures import compare_figure
from common.tools.prove.recomputation.figure_functions import MEAN_METRICS, known_name
from common.tools.prove.recomputation.split_passes import SplitPass

STANDARD_ERRORS = 2.0  # in the first run
# In the longer run, a model that guesses gets a second chance. With two standard errors in both
# runs, it would pass in about 5 % of cases; with this number in the longer run, in about 3 %.
LONGER_STANDARD_ERRORS = 2.5
RELATIVE_MARGIN = 0.1  # share of the figure before training, if no standard error is known
# Metrics that are shares of samples, from 0 to 1.
SHARES = ("accuracy", "error", "f1", "macro_f1")


@dataclass(frozen=True)
class ObjectiveValue:
    """The objective's value in one evaluation, and the outcomes of its samples where known."""

    value: float
    sample_count: int  # the number of samples in the split
    split_passes: Sequence[SplitPass]


@dataclass(frozen=True)
class Improvement:
    """How much an objective has improved, and how much it has to improve."""

    # With paired samples, the gain and the margin have the unit of a sample's value in
    # `MEAN_METRICS`: of the loss for a perplexity, and of the squared error for an RMSE. Otherwise,
    # they have the metric's unit.
    gain: float  # negative if the objective has become worse
    margin: float
    basis: str  # how the margin is computed, in words

    @property
    def is_enough(self) -> bool:
        return self.gain > self.margin  # False for NaN


def improvement(
    objective: Objective,
    before: ObjectiveValue,
    after: ObjectiveValue,
    standard_errors: float,
) -> Improvement:
    """Compare two evaluations of the same samples.

    Args:
        standard_errors: the margin, as a number of standard errors.
    """
    sign = objective.sign
    metric = known_name(objective.metric)
    pairs = paired_values(metric, before, after)
    if len(pairs) > 1:
        return improvement_of_pairs(pairs, sign, standard_errors, is_share=metric in SHARES)
    gain = sign * (after.value - before.value)
    if metric in SHARES:
        return improvement_of_shares(gain, before, after, standard_errors)
    basis = (
        f"{RELATIVE_MARGIN:.0%} of the value before training, because its standard error is unknown"
    )
    return Improvement(gain, RELATIVE_MARGIN * abs(before.value), basis)


def improvement_of_pairs(
    pairs: Sequence[tuple[float, float]], sign: int, standard_errors: float, *, is_share: bool
) -> Improvement:
    """Compare the values of each sample before and after training.

    Args:
        pairs: the value before and the value after, for each of at least two samples.
        sign: see `Objective.sign`.
        is_share: whether the metric is a share of samples.
    """
    differences = [sign * (after - before) for before, after in pairs]
    count = len(differences)
    gain = fmean(differences)
    squares = math.fsum((difference - gain) ** 2 for difference in differences)
    standard_error = math.sqrt(squares / (count - 1) / count)
    margin = standard_errors * standard_error
    # If few samples change, the distribution is coarse. A single sample must not decide.
    if is_share:
        margin += 1 / count
    basis = f"{standard_errors:g} standard errors of {count} paired samples"
    return Improvement(gain, margin, basis)


def improvement_of_shares(
    gain: float, before: ObjectiveValue, after: ObjectiveValue, standard_errors: float
) -> Improvement:
    """Compare two shares of samples as if they came from different samples."""
    variance = 0.0
    for evaluation in (before, after):
        share = min(1.0, max(0.0, evaluation.value))
        variance += share * (1 - share) / evaluation.sample_count
    # As with paired samples, a single sample must not decide.
    margin = standard_errors * math.sqrt(variance) + 1 / after.sample_count
    basis = f"{standard_errors:g} standard errors of a share of {after.sample_count} samples"
    return Improvement(gain, margin, basis)


def paired_values(
    metric: str, before: ObjectiveValue, after: ObjectiveValue
) -> list[tuple[float, float]]:
    """Return each sample's values before and after training.

    The result is empty if the metric is not a mean over samples, if a value is unknown, or if the
    values do not reproduce the logged figures or are not those of the same samples.
    """
    # A reading of the split has a `SplitPass` for each loss that the recipe computes.
    for split_pass, later_split_pass in zip(before.split_passes, after.split_passes, strict=False):
        comparison_before = compare_figure(metric, before.value, [split_pass])
        comparison_after = compare_figure(metric, after.value, [later_split_pass])
        if not (comparison_before.is_correct and comparison_after.is_correct):
            continue
        values = values_by_sample(metric, split_pass)
        later_values = values_by_sample(metric, later_split_pass)
        if values and values.keys() == later_values.keys():
            return [(value, later_values[sample]) for sample, value in values.items()]
    return []


def values_by_sample(metric: str, split_pass: SplitPass) -> Mapping[int, float]:
    """Return the values of the samples that a metric averages; empty if one is unknown."""
    mean_metric = MEAN_METRICS.get(metric)
    if mean_metric is None:
        return {}
    values: dict[int, float] = {}
    for outcome in split_pass.unique_outcomes:
        value = mean_metric.sample_value(outcome)
        if value is None:
            return {}
        values[outcome.sample_index] = value
    return values
