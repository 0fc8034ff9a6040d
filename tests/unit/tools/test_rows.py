"""Rows of metrics: read as far as they are whole, and compared figure by figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.metric_names import STEP
from common.run_directory.records import METRICS_FILE
from common.tools.rows import (
    MetricsRow,
    first_differing_figure,
    first_differing_row,
    number_or_none,
    read_rows,
    step_of_row,
)

FIGURES = st.dictionaries(
    st.sampled_from(["train/loss", "val/loss", "note", "perf/samples_per_second"]),
    st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=3)),
)
ROWS = st.lists(FIGURES, min_size=1, max_size=4)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(figures=ROWS, share=st.floats(0, 1, exclude_max=True))
def test_torn_last_line_is_left_out(
    figures: list[MetricsRow], share: float, tmp_path: Path
) -> None:
    rows: list[MetricsRow] = [{STEP: number, **row} for number, row in enumerate(figures)]
    lines = [json.dumps(row) for row in rows]
    torn = lines[-1][: int(share * len(lines[-1]))]
    path = tmp_path / METRICS_FILE
    path.write_text("".join(f"{line}\n" for line in lines[:-1]) + torn)
    assert [*map(step_of_row, read_rows(tmp_path))] == [*range(len(rows) - 1)]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert first_differing_row(read_rows(tmp_path), read_rows(tmp_path)) is None


def test_run_without_rows_has_none(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []


def test_damaged_line_is_told(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(f'half\n{{"{STEP}": 1}}\n')
    with pytest.raises(UserError, match="line 1, is damaged: remove this line"):
        read_rows(tmp_path)


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
