"""Rows of metrics, compared figure by figure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.run_directory.records import MetricsRow
from common.tools.rows import first_differing_figure, number_or_none

FIGURES = st.dictionaries(
    st.sampled_from(["train/loss", "val/loss", "note", "perf/samples_per_second"]),
    st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=3)),
)


@given(FIGURES, FIGURES)
def test_a_figure_that_one_row_lacks_differs(first: MetricsRow, second: MetricsRow) -> None:
    """Null is a figure that was NaN, so it differs from none."""
    compared = {*first, *second} - {"perf/samples_per_second"}
    differing = {
        name
        for name in compared
        if name not in first or name not in second or first[name] != second[name]
    }
    name = first_differing_figure(first, second)
    assert (name in differing) if differing else name is None


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1.0), (0.5, 0.5), (None, None), (True, None), ("1", None)]
)
def test_numbers_are_told_from_other_values(value: object, number: float | None) -> None:
    assert number_or_none(value) == number
