"""Simulated experiments: equal groups are rarely called different, and real differences found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import first
from tests.unit.tools.statistics.simulation import (
    coverage_of_lines,
    error_rates,
    power_of_needed_runs,
    rate_of_any_error,
    rates_with_shared_seeds,
)

REPETITIONS = 1500
# Three standard errors of a rate of 5 %.
TOLERANCE = 3 * math.sqrt(0.05 * 0.95 / REPETITIONS)


@pytest.mark.parametrize("design", [(3, 3, 1.0), (5, 5, 3.0), (10, 20, 2.0)])
def test_equal_groups_are_called_different_in_five_percent(
    design: tuple[int, int, float],
) -> None:
    """Very small groups are called different slightly less often."""
    rate, _ = error_rates(np.random.default_rng(1), design, REPETITIONS, 0.0)
    least = 0.01 if min(design[:2]) < 5 else 0.05 - TOLERANCE
    assert least < rate < 0.05 + TOLERANCE


def test_intervals_cover_the_true_difference() -> None:
    """The intervals miss the true difference in about five percent of the experiments."""
    _, missed = error_rates(np.random.default_rng(2), (5, 8, 2.0), REPETITIONS, 1.7)
    assert missed == pytest.approx(0.05, abs=TOLERANCE)


def test_several_equal_groups_are_called_different_in_five_percent_together() -> None:
    """These are all pairs. Without the correction, it would be about 20 %."""
    rate = rate_of_any_error(np.random.default_rng(3), groups=4, count=6, repetitions=700)
    assert 0.01 < rate < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 700)


@pytest.mark.parametrize("correlation", first(1, [0.5, 0.0, 0.9]))
def test_pairs_are_right_whether_or_not_seeds_share_chance(correlation: float) -> None:
    """Pairs keep the rate of five percent, and find more if the runs of a seed are alike."""
    generator = np.random.default_rng(5)
    rates = rates_with_shared_seeds(generator, 5, correlation, REPETITIONS)
    assert rates.equal_by_pairs == pytest.approx(0.05, abs=TOLERANCE)
    assert rates.equal_by_welch < 0.05 + TOLERANCE
    if correlation:
        assert rates.different_by_pairs > rates.different_by_welch
    else:
        assert rates.different_by_pairs > rates.different_by_welch - 0.2


@pytest.mark.parametrize("effect", [(1.0, 1.0), (1.5, 2.0)])
def test_needed_runs_find_the_difference_in_eighty_percent(effect: tuple[float, float]) -> None:
    """The number is an integer, so that the power may be a little more."""
    _, power = power_of_needed_runs(np.random.default_rng(4), effect, 1000)
    tolerance = 3 * math.sqrt(0.8 * 0.2 / 1000)
    assert 0.8 - tolerance < power < 0.84 + tolerance


@pytest.mark.parametrize(("lines", "correlation"), [(10, 0.0), (10, 0.5), (50, 0.5), (50, 0.8)])
def test_intervals_of_log_lines_cover_although_neighbours_are_alike(
    lines: int, correlation: float
) -> None:
    """As independent values, 50 lines with a correlation of 0.5 would cover 75 % of the time."""
    covered = coverage_of_lines(np.random.default_rng(7), lines, correlation, 1000)
    assert covered > 0.9
