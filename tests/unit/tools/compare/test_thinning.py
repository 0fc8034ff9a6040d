"""Thinned curves: they are short, and keep their extremes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tools.compare.thinning import kept_indices, points_per_curve

VALUES = st.lists(st.floats(-1e99, 1e99), min_size=1, max_size=300)


@given(values=VALUES, limit=st.integers(4, 100))
def test_thinned_curve_keeps_its_ends_and_extremes(values: list[float], limit: int) -> None:
    """A short curve keeps all of its points."""
    indices = kept_indices([values], limit)
    assert len(indices) <= limit
    assert indices == sorted(set(indices))
    assert {0, len(values) - 1} <= set(indices)
    kept = [values[index] for index in indices]
    assert (min(kept), max(kept)) == (min(values), max(values))
    if len(values) <= limit:
        assert indices == [*range(len(values))]


@given(pairs=st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=300))
def test_thinned_band_keeps_the_extremes_of_both_edges(pairs: list[tuple[float, float]]) -> None:
    """The edges may have their extremes at different points."""
    columns = [[pair[edge] for pair in pairs] for edge in (0, 1)]
    indices = kept_indices(columns, 40)
    assert len(indices) <= 40
    for column in columns:
        kept = [column[index] for index in indices]
        assert (min(kept), max(kept)) == (min(column), max(column))


def test_each_part_of_a_curve_keeps_its_spike() -> None:
    """A spike of one row is visible wherever it is."""
    values = [0.0] * 100_000
    for spike in range(7, 100_000, 10_000):
        values[spike] = 1.0 + spike
    indices = kept_indices([values], 2000)
    assert len(indices) <= 2000
    assert {*range(7, 100_000, 10_000)} <= set(indices)


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [([], 2000), ([100_000], 2000), ([2000] * 30, 2000), ([5] * 1000, 2000), ([9999] * 9999, 40)],
)
def test_few_curves_have_many_points(lengths: list[int], limit: int) -> None:
    """Many short curves need no thinning."""
    assert points_per_curve(lengths, 2000, 40, 60_000) == limit


@given(lengths=st.lists(st.integers(1, 10_000), max_size=1000))
def test_all_curves_together_stay_below_the_limit(lengths: list[int]) -> None:
    """At 40 points each, 1,000 curves have 40,000."""
    limit = points_per_curve(lengths, 2000, 40, 60_000)
    assert sum(min(length, limit) for length in lengths) <= 60_000
