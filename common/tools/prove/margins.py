"""How much an objective has to improve, so that chance alone explains it in few cases.

A model that guesses is better than before in half of all evaluations. So an improvement counts only
beyond a margin of two standard errors, and in a second, longer run, two and a half.

They come from the differences of single samples, if the outcomes of the samples are known (a paired
comparison, which is the sharper one), and otherwise from the binomial distribution. Figures of
other kinds have to change by a share of themselves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.objective import Objective
from common.tools.prove.outcomes import Reading, Row, judge

ERRORS = 2.0  # standard errors
# In the second run. A model that guesses gets another chance there, so that both together would
# pass in about 5 % of cases with two standard errors, and in 3 % with these.
LATER_ERRORS = 2.5
RELATIVE = 0.1  # of the figure before training, where no standard error is known
SHARES = ("accuracy", "error", "error_rate", "f1", "macro_f1")  # of samples, from 0 to 1
# The value of a sample whose mean is the figure, or rises with it.
VALUES: dict[str, Callable[[Row], float | None]] = {
    "accuracy": lambda row: row.hit,
    "error": lambda row: None if row.hit is None else 1 - row.hit,
    "error_rate": lambda row: None if row.hit is None else 1 - row.hit,
    "loss": lambda row: row.loss,
    "perplexity": lambda row: row.loss,
    "mse": lambda row: row.square,
    "rmse": lambda row: row.square,
    "mae": lambda row: row.distance,
}


@dataclass(frozen=True)
class Evaluation:
    """A figure of one evaluation, and the outcomes of its samples where they are known."""

    value: float
    samples: int  # of the split
    readings: Sequence[Reading] = ()


@dataclass(frozen=True)
class Improvement:
    """By how much an objective has become better, and how much is needed."""

    gain: float  # below 0: it has become worse
    margin: float
    basis: str  # of the margin, in words

    @property
    def is_enough(self) -> bool:
        return self.gain > self.margin  # NaN is not


def improvement(
    objective: Objective, before: Evaluation, after: Evaluation, errors: float = ERRORS
) -> Improvement:
    """Compare two evaluations of the same samples.

    Args:
        errors: standard errors of the margin.
    """
    sign = 1.0 if objective.mode == "max" else -1.0
    metric = objective.metric
    pairs = paired_values(metric, before, after)
    if len(pairs) > 1:
        return of_pairs(pairs, sign, errors, is_share=metric in SHARES)
    gain = sign * (after.value - before.value)
    if metric in SHARES:
        return of_shares(gain, before, after, errors)
    basis = f"{RELATIVE:.0%} of the value before training, because its standard error is unknown"
    return Improvement(gain, RELATIVE * abs(before.value), basis)


def of_pairs(
    pairs: Sequence[tuple[float, float]], sign: float, errors: float, *, is_share: bool
) -> Improvement:
    """Compare the values of each sample before training and after it."""
    differences = [sign * (after - before) for before, after in pairs]
    count = len(differences)
    gain = fmean(differences)
    squares = math.fsum((difference - gain) ** 2 for difference in differences)
    margin = errors * math.sqrt(squares / (count - 1) / count)
    # The distribution of few changed samples is coarse, so one of them must not decide.
    margin += is_share / count
    return Improvement(gain, margin, f"{errors:g} standard errors, paired by {count} samples")


def of_shares(gain: float, before: Evaluation, after: Evaluation, errors: float) -> Improvement:
    """Compare two shares of samples, as if they were independent."""
    variance = 0.0
    for evaluation in (before, after):
        share = min(1.0, max(0.0, evaluation.value))
        variance += share * (1 - share) / evaluation.samples
    margin = errors * math.sqrt(variance) + 1 / after.samples
    basis = f"{errors:g} standard errors of a share of {after.samples} samples"
    return Improvement(gain, margin, basis)


def paired_values(metric: str, before: Evaluation, after: Evaluation) -> list[tuple[float, float]]:
    """Return each sample's values before and after; none if the figure is not their mean."""
    for reading, later_reading in zip(before.readings, after.readings, strict=False):
        is_right = judge(metric, before.value, [reading]).is_right
        if not (is_right and judge(metric, after.value, [later_reading]).is_right):
            continue
        values = values_by_sample(metric, reading)
        later_values = values_by_sample(metric, later_reading)
        if values and values.keys() == later_values.keys():
            return [(value, later_values[sample]) for sample, value in values.items()]
    return []


def values_by_sample(metric: str, reading: Reading) -> Mapping[int, float]:
    """Return the value of each sample whose mean is a figure; empty if one is unknown."""
    value_of = VALUES.get(metric)
    if value_of is None:
        return {}
    values: dict[int, float] = {}
    for row in reading.unique_rows:
        value = value_of(row)
        if value is None:
            return {}
        values[row.sample] = value
    return values
