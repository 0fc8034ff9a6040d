"""Intervals, numbers of runs and standard errors, beside SciPy and where little is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from common.tools.statistics.samples import (
    CONFIDENCE,
    MAX_RUNS,
    Sample,
    proportion_error,
    runs_needed,
    simultaneous_confidence,
    welch_interval,
)

GROUP = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12)


# One group may be almost constant. The rounding error of its variance, about which SciPy warns, is
# then far below the other group's variance.
@pytest.mark.filterwarnings("ignore:Precision loss occurred:RuntimeWarning")
@given(first=GROUP, second=GROUP, confidence=st.floats(0.5, 0.999))
def test_interval_agrees_with_scipy(
    first: list[float], second: list[float], confidence: float
) -> None:
    """Groups may differ in size and spread."""
    samples = Sample.of(first), Sample.of(second)
    # SciPy computes variances with rounding errors, which show if they are tiny beside the values.
    spread = max(sample.deviation or 0.0 for sample in samples)
    size = max(map(abs, [*first, *second]))
    assume(spread > 1e-4 * size and spread > 1e-100)  # the square of a smaller one is 0
    interval = welch_interval(*samples, confidence)
    assert interval is not None
    expected = stats.ttest_ind(second, first, equal_var=False)
    bounds = expected.confidence_interval(confidence)
    assert interval.degrees == pytest.approx(float(expected.df), rel=1e-6)
    scale = abs(bounds.high - bounds.low)
    assert (interval.low, interval.high) == pytest.approx(
        (float(bounds.low), float(bounds.high)), rel=1e-6, abs=1e-6 * scale
    )
    assert interval.confidence == confidence


def test_values_that_are_no_numbers_are_left_out() -> None:
    """NaN and infinities count as missing, and not as zero."""
    assert Sample.of([1.0, math.nan, 3.0, math.inf, -math.inf]) == Sample(2, 2.0, math.sqrt(2.0))
    assert Sample.of([math.nan]) == Sample(0, None, None)
    assert Sample.of([0.5]) == Sample(1, 0.5, None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], [1.0, 2.0]),
        ([1.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 1.0], [2.0, 2.0]),  # nothing shows how much they vary
        ([1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_too_little_gives_no_interval(first: list[float], second: list[float]) -> None:
    """Too few values give neither an interval nor a number of runs."""
    samples = Sample.of(first), Sample.of(second)
    assert welch_interval(*samples, CONFIDENCE) is None
    assert runs_needed(*samples, CONFIDENCE) is None


def test_one_group_may_be_constant() -> None:
    """Then the other group's degrees of freedom count."""
    interval = welch_interval(
        Sample.of([1.0, 1.0, 1.0]), Sample.of([2.0, 2.1, 2.2, 2.3]), confidence=CONFIDENCE
    )
    assert interval is not None
    assert interval.degrees == pytest.approx(3.0)
    assert interval.excludes_zero


@given(exponent=st.integers(-300, 300))
def test_interval_of_tiny_and_of_huge_values(exponent: int) -> None:
    """Squares must neither overflow nor vanish: a perplexity may be 1e300."""
    scale = 10.0**exponent
    first = Sample.of([1 * scale, 2 * scale, 3 * scale])
    second = Sample.of([11 * scale, 12 * scale, 13 * scale])
    interval = welch_interval(first, second, confidence=CONFIDENCE)
    assert interval is not None
    assert interval.degrees == pytest.approx(4.0)
    assert (interval.low, interval.high) == pytest.approx((7.733 * scale, 12.267 * scale), rel=1e-3)
    assert runs_needed(first, second, confidence=CONFIDENCE) == 2


@given(
    difference=st.floats(0.3, 5.0), deviation=st.floats(0.2, 3.0), confidence=st.floats(0.8, 0.99)
)
def test_needed_runs_have_the_power(difference: float, deviation: float, confidence: float) -> None:
    """The exact power, from SciPy's noncentral t, is 80 %, and one run less would not reach it."""
    first = Sample(3, 0.0, 1.0)
    second = Sample(3, difference, deviation)
    count = runs_needed(first, second, confidence)
    assert count is not None

    def power(runs: int) -> float:
        variance = (1.0 + deviation**2) / runs
        degrees = (runs - 1) * (1.0 + deviation**2) ** 2 / (1.0 + deviation**4)
        limit = stats.t.ppf(0.5 + confidence / 2, degrees)
        return float(stats.nct.sf(limit, degrees, difference / math.sqrt(variance)))

    assert power(count) > 0.79
    assert count == 2 or power(count - 1) < 0.82


def test_needed_runs_have_limits() -> None:
    """No number of runs tells equal groups apart, and nobody trains ten thousand."""
    noisy = Sample(3, 1.0, 0.5)
    assert runs_needed(noisy, Sample(3, 1.0, 0.4), confidence=CONFIDENCE) is None
    assert runs_needed(noisy, Sample(3, 1.0 + 1e-6, 0.5), confidence=CONFIDENCE) is None
    assert runs_needed(noisy, Sample(3, 1e-300, 0.5), confidence=CONFIDENCE) is not None
    assert runs_needed(Sample(3, 0.0, 1.0), Sample(3, 1e-200, 1.0), confidence=CONFIDENCE) is None
    close = runs_needed(Sample(3, 0.0, 1.0), Sample(3, 0.05, 1.0), confidence=CONFIDENCE)
    assert close is not None
    assert 6000 < close < MAX_RUNS


def test_needed_runs_exceed_those_that_did_not_suffice() -> None:
    """Groups of equal size that can't be told apart need more runs than they have."""
    first = Sample.of([0.970, 0.975, 0.972])
    second = Sample.of([0.975, 0.979, 0.974])
    interval = welch_interval(first, second, confidence=CONFIDENCE)
    assert interval is not None
    assert not interval.excludes_zero
    needed = runs_needed(first, second, confidence=CONFIDENCE)
    assert needed is not None
    assert needed > 3


def test_confidence_of_several_intervals() -> None:
    """The errors of all of them add up to that of one."""
    assert simultaneous_confidence(1) == pytest.approx(0.95)
    assert simultaneous_confidence(5) == pytest.approx(0.99)
    assert simultaneous_confidence(0) == pytest.approx(0.95)


def test_standard_error_of_a_proportion() -> None:
    """0.9750 against 0.9722 of 360 samples is one sample, and less than the standard error."""
    error = proportion_error(0.975, 360)
    assert error == pytest.approx(math.sqrt(0.975 * 0.025 / 360))
    assert error is not None
    assert error > 0.9750 - 0.9722
    assert proportion_error(1.0, 360) == proportion_error(1 - 0.5 / 360, 360)
    assert proportion_error(0.0, 360) == pytest.approx(proportion_error(1.0, 360))


@pytest.mark.parametrize(
    ("proportion", "count"), [(1.1, 10), (-0.1, 10), (math.nan, 10), (0.5, 0), (0.5, math.nan)]
)
def test_no_proportion_has_no_standard_error(proportion: float, count: float) -> None:
    """Some metrics that are called accuracy are none."""
    assert proportion_error(proportion, count) is None
