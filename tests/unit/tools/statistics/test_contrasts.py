"""Contrasts of two groups: in pairs of equal seeds beside SciPy, and by Welch's interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from common.tools.statistics.contrasts import contrast_by_seeds, welch_contrast
from common.tools.statistics.samples import CONFIDENCE, Sample, paired_interval, pairs_needed

PAIR = st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))


def by_seed(values: list[float]) -> dict[str, float]:
    """Return values of the seeds 0, 1, ..."""
    return {str(seed): value for seed, value in enumerate(values)}


@given(pairs=st.lists(PAIR, min_size=3, max_size=12), confidence=st.floats(0.5, 0.999))
def test_pairs_agree_with_scipy(pairs: list[tuple[float, float]], confidence: float) -> None:
    """The order of the seeds does not matter."""
    first = [pair[0] for pair in pairs]
    second = [pair[1] for pair in pairs]
    differences = np.subtract(second, first)
    # SciPy's variances have rounding errors, which show if they are tiny beside the values.
    assume(differences.std() > 1e-4 * np.abs([first, second]).max())
    reversed_second = dict(reversed(by_seed(second).items()))
    contrast = contrast_by_seeds(by_seed(first), reversed_second, confidence)
    assert contrast.is_paired
    assert contrast.interval is not None
    bounds = stats.ttest_rel(second, first).confidence_interval(confidence)
    scale = abs(bounds.high - bounds.low)
    assert (contrast.interval.low, contrast.interval.high) == pytest.approx(
        (float(bounds.low), float(bounds.high)), rel=1e-6, abs=1e-6 * scale
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"0": 0.7, "1": 0.8}, {"0": 0.9, "1": 0.8}),  # too few
        ({"0": 0.7, "1": 0.8, "2": 0.75}, {"0": 0.9, "1": 0.8, "3": 0.85}),  # other seeds
        ({"0": 0.7, "1": 0.8, "2": 0.75}, {"0": 0.9, "1": 0.8, "2": 0.85, "3": 0.7}),
        # Rounding makes these equal differences vary a little.
        ({"0": 0.1, "1": 0.2, "2": 0.3}, {"0": 0.4, "1": 0.5, "2": 0.6}),
    ],
)
def test_other_groups_are_compared_by_welch(
    first: dict[str, float], second: dict[str, float]
) -> None:
    """Pairs need the same seeds in both groups, and differences that vary."""
    contrast = contrast_by_seeds(first, second, CONFIDENCE)
    samples = Sample.of([*first.values()]), Sample.of([*second.values()])
    assert contrast == welch_contrast(*samples, CONFIDENCE)
    assert not contrast.is_paired


@given(
    counts=st.lists(st.integers(0, 350), min_size=3, max_size=10),
    more=st.integers(1, 10),
    precision=st.sampled_from(["float32", "float64"]),
)
def test_equal_differences_show_no_chance(counts: list[int], more: int, precision: str) -> None:
    """Rounding makes accuracies differ a little, although each seed has as many more hits."""
    first = (np.array(counts, precision) / np.array(360, precision)).tolist()
    second = (np.array([count + more for count in counts], precision) / 360).tolist()
    contrast = contrast_by_seeds(by_seed(first), by_seed(second), CONFIDENCE)
    assert contrast == welch_contrast(Sample.of(first), Sample.of(second), CONFIDENCE)


def test_needed_pairs_are_enough_for_pairs() -> None:
    """Two seeds would be compared by Welch's interval."""
    contrast = contrast_by_seeds(
        by_seed([0.1, 0.2, 0.3]), by_seed([0.81, 0.9, 1.0]), confidence=CONFIDENCE
    )
    assert contrast.is_paired
    assert contrast.runs_needed == 3


@given(deviation=st.floats(0.2, 3.0), confidence=st.floats(0.8, 0.99))
def test_needed_pairs_have_the_power(deviation: float, confidence: float) -> None:
    """The exact power, from SciPy's noncentral t, is 80 %, and one pair less would not reach it."""
    count = pairs_needed(Sample(3, 1.0, deviation), confidence)
    assert count is not None

    def power(pairs: int) -> float:
        limit = stats.t.ppf(0.5 + confidence / 2, pairs - 1)
        return float(stats.nct.sf(limit, pairs - 1, math.sqrt(pairs) / deviation))

    assert power(count) > 0.79
    assert count == 2 or power(count - 1) < 0.82


def test_too_few_pairs_give_no_interval() -> None:
    """One pair, or pairs whose differences are equal, show nothing about chance."""
    for sample in (Sample.of([]), Sample.of([0.1]), Sample.of([0.1, 0.1])):
        assert paired_interval(sample, CONFIDENCE) is None
        assert pairs_needed(sample, CONFIDENCE) is None
    assert pairs_needed(Sample(3, 0.0, 0.1), CONFIDENCE) is None
