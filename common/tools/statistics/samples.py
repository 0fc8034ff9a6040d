"""Means, intervals and numbers of runs: what a few runs say about a difference.

The interval of a difference is Welch's: B. L. Welch, "The generalization of Student's problem when
several different population variances are involved", Biometrika 34, 1947. It does not assume that
both groups vary equally. If each run of one group has a partner in the other, it is Student's for
the differences of the pairs. Like every t interval, both assume values (or differences) that are
roughly normal, and independent of each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

from common.tools.statistics.student import quantile

CONFIDENCE = 0.95  # confidence of an interval, if there is one comparison
POWER = 0.8  # the probability with which `count_needed` runs find a difference
MIN_RUNS = 2  # with fewer runs or values, there is no standard deviation
MAX_RUNS = 10_000  # `count_needed` counts no further
# Relative to the values. Metrics that were computed in float32 are rounded by a tenth of this.
LARGEST_ROUNDING = 1e-6


@dataclass(frozen=True)
class Sample:
    """The mean and the spread of one group's values.

    Values that are NaN or infinite are left out. With no value, the mean is None. With fewer than
    two values, the standard deviation is None.
    """

    count: int
    mean: float | None
    deviation: float | None  # the standard deviation, with count - 1 in its denominator

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Return the sample of independent values; see `series_sample` for a time series."""
        finite = [value for value in values if math.isfinite(value)]
        mean = fmean(finite) if finite else None
        deviation = stdev(finite) if len(finite) >= MIN_RUNS else None
        return cls(len(finite), mean, deviation)


def series_sample(values: Sequence[float]) -> Sample:
    """Describe values that follow each other in time, such as the speeds at a run's log lines.

    Neighbours are alike, so n values of a series say less than n independent values. The count of
    the result is the number of independent values whose mean would be as uncertain as that of the
    series. It is at least 2, except for fewer than two values. It is n for values without spread.

    For a series that is autoregressive of order one, it is n (1 - r) / (1 + r), where r is the
    autocorrelation of neighbours (G. V. Bayley and J. M. Hammersley, "The 'effective' number of
    independent observations in an autocorrelated time series", Supplement to the Journal of the
    Royal Statistical Society 8, 1946). The estimate of r is corrected for its bias of about
    -(1 + 3 r) / n (M. G. Kendall, "Note on bias in the estimation of autocorrelation", Biometrika
    41, 1954). A negative r does not raise the count.
    """
    sample = Sample.of(values)
    if sample.mean is None or not sample.deviation:
        return sample
    residuals = [value - sample.mean for value in values if math.isfinite(value)]
    squares = math.fsum(residual * residual for residual in residuals)
    products = math.fsum(first * second for first, second in pairwise(residuals))
    estimate = products / squares if squares > 0 else 0.0
    corrected = estimate + (1.0 + 3.0 * estimate) / sample.count
    correlation = min(max(corrected, 0.0), 1.0)
    effective = math.floor(sample.count * (1.0 - correlation) / (1.0 + correlation))
    return replace(sample, count=max(effective, MIN_RUNS))


@dataclass(frozen=True)
class ConfidenceInterval:
    """A confidence interval of a difference: the second group's mean minus the first group's."""

    difference: float
    low: float
    high: float
    confidence: float  # such as 0.95
    degrees: float  # degrees of freedom of Student's t

    @property
    def excludes_zero(self) -> bool:
        """Whether the groups can be told apart."""
        return self.low > 0 or self.high < 0


def welch_interval(first: Sample, second: Sample, confidence: float) -> ConfidenceInterval | None:
    """Return Welch's interval of the difference of two means.

    The groups may have different sizes and different spreads. The result is None if a group has
    fewer than two values, or if neither group varies: nothing then shows how much values vary by
    chance.
    """
    if first.mean is None or second.mean is None:
        return None
    if first.deviation is None or second.deviation is None:
        return None
    first_error = first.deviation / math.sqrt(first.count)  # standard error of the mean
    second_error = second.deviation / math.sqrt(second.count)
    # Squares of errors would overflow for the perplexity of a run that diverged.
    error = math.hypot(first_error, second_error)
    if error == 0.0:
        return None
    first_share = (first_error / error) ** 2
    second_share = (second_error / error) ** 2
    degrees = 1.0 / (first_share**2 / (first.count - 1) + second_share**2 / (second.count - 1))
    # Rounding may leave slightly less than the least possible value, which is 1.
    degrees = max(degrees, 1.0)
    margin = quantile(0.5 + confidence / 2, degrees) * error
    difference = second.mean - first.mean
    return ConfidenceInterval(
        difference, difference - margin, difference + margin, confidence, degrees
    )


def paired_interval(differences: Sample, confidence: float) -> ConfidenceInterval | None:
    """Return Student's interval of the mean difference of pairs of runs, such as of equal seeds.

    The result is None if there are fewer than two pairs, or if their differences do not vary.

    Args:
        differences: for each pair, the second group's value minus the first group's.
    """
    if differences.mean is None or not differences.deviation:
        return None
    degrees = differences.count - 1.0
    error = differences.deviation / math.sqrt(differences.count)
    margin = quantile(0.5 + confidence / 2, degrees) * error
    difference = differences.mean
    return ConfidenceInterval(
        difference, difference - margin, difference + margin, confidence, degrees
    )


def pairs_needed(differences: Sample, confidence: float) -> int | None:
    """Return the number of pairs that would probably tell two groups apart; see `runs_needed`.

    Args:
        differences: see `paired_interval`.
    """
    if not differences.mean or not differences.deviation:
        return None
    return count_needed(differences.deviation / differences.mean, 1.0, confidence)


def runs_needed(first: Sample, second: Sample, confidence: float) -> int | None:
    """Return the number of runs per group that would probably tell the two groups apart.

    The observed difference and standard deviations are taken for the true ones; see `count_needed`.
    The result is None if the means are equal, if no spread is known (see `welch_interval`), or if
    `MAX_RUNS` runs are too few.
    """
    if first.mean is None or second.mean is None or first.mean == second.mean:
        return None
    if first.deviation is None or second.deviation is None:
        return None
    deviation = math.hypot(first.deviation, second.deviation)
    if deviation == 0.0:
        return None
    # The square of a tiny difference would underflow to 0, so divide first and square afterwards.
    relative_deviation = deviation / (second.mean - first.mean)
    first_share = (first.deviation / deviation) ** 2
    # With n runs in each group, Welch's degrees of freedom are n - 1 times this factor.
    degrees_factor = 1.0 / (first_share**2 + (1.0 - first_share) ** 2)
    return count_needed(relative_deviation, degrees_factor, confidence)


def count_needed(relative_deviation: float, degrees_factor: float, confidence: float) -> int | None:
    """Return how many runs of each group, or how many pairs, would probably show a difference.

    The result is the smallest n of at least 2 for which

        normal_cdf((d - t (1 - 1 / (4 f))) / sqrt(1 + t² / (2 f))) >= POWER

    Here d is the difference in standard errors, f are the degrees of freedom, and t is the quantile
    of Student's t for the confidence. All three depend on n. The left side is the usual
    approximation of noncentral t by the normal distribution (M. Abramowitz and I. Stegun, Handbook
    of Mathematical Functions, 1964, 26.7.10).

    Args:
        relative_deviation: the standard deviation of a difference between single runs, divided by
            the difference of the means.
        degrees_factor: the degrees of freedom, divided by n - 1.

    Returns:
        The number, or None if `MAX_RUNS` are too few.
    """
    relative_variance = relative_deviation * relative_deviation
    probability = 0.5 + confidence / 2
    # With the quantiles of the normal distribution, the formula gives too small a number, so the
    # count starts there.
    normal = NormalDist()
    estimate = (normal.inv_cdf(probability) + normal.inv_cdf(POWER)) ** 2 * relative_variance
    if estimate > MAX_RUNS:
        return None
    count = max(MIN_RUNS, math.ceil(estimate))
    degrees = degrees_factor * (count - 1)
    while detection_power(count, relative_variance, degrees, probability) < POWER:
        count += 1
        degrees = degrees_factor * (count - 1)
    return count if count <= MAX_RUNS else None


def detection_power(
    count: int, relative_variance: float, degrees: float, probability: float
) -> float:
    """Return how likely groups of `count` runs are told apart; see `count_needed` for the formula.

    Args:
        relative_variance: the variance of a difference between single runs, divided by the squared
            difference of the means.
        degrees: the degrees of freedom.
        probability: the groups are told apart if Student's t exceeds its quantile for this
            probability.
    """
    if relative_variance == 0.0:  # it underflowed
        return 1.0
    limit = quantile(probability, degrees)
    difference = math.sqrt(count / relative_variance)  # of the means, in standard errors
    excess = difference - limit * (1.0 - 1.0 / (4.0 * degrees))
    return NormalDist().cdf(excess / math.sqrt(1.0 + limit * limit / (2.0 * degrees)))


def are_equal_apart_from_rounding(first: float, second: float) -> bool:
    """Return whether two values differ by no more than rounding explains."""
    return math.isclose(first, second, rel_tol=LARGEST_ROUNDING)


def simultaneous_confidence(comparisons: int) -> float:
    """Return the confidence that each interval needs, so that all hold at once with `CONFIDENCE`.

    This is Bonferroni's correction, which makes each interval wider: O. J. Dunn, "Multiple
    comparisons among means", Journal of the American Statistical Association 56, 1961. It holds
    even for intervals that depend on each other, as those of all pairs of groups do. Holm's
    procedure would find slightly more differences, but it corrects only the verdicts: the printed
    intervals would contradict them. Tukey and Kramer's intervals of all pairs are narrower, but
    they assume that all groups vary equally.
    """
    return 1.0 - (1.0 - CONFIDENCE) / max(1, comparisons)


def proportion_error(proportion: float, count: float) -> float | None:
    """Return the standard error of a proportion among independent samples, such as an accuracy.

    The error is the square root of p (1 - p) / count. For a proportion of 0 or 1, this would be 0,
    as if no other sample could turn out differently. So a proportion that is less than half a
    sample away from 0 or 1 gets the error of the proportion half a sample away.

    The result is None if the proportion is not between 0 and 1, or if there are no samples.
    """
    if not 0.0 <= proportion <= 1.0 or not count >= 1:
        return None
    half_sample = 0.5 / count
    inner = min(max(proportion, half_sample), 1.0 - half_sample)
    return math.sqrt(inner * (1.0 - inner) / count)
