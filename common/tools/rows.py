"""Finds the first figure in which two rows of `metrics.jsonl` differ."""

import math
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from common.metric_names import STEP
from common.run_directory.records import MetricsRow, is_number

# The prefixes of the names of figures that depend on the clock or on the state of the machine.
CLOCK_PREFIXES = ("perf/", "memory/", "gpu/", "time/")


def step_of_row(row: Mapping[str, JsonValue]) -> int:
    """Return the update at which a row was logged; tools find rows by it."""
    step = row[STEP]
    assert is_number(step)  # `StoredRun.rows` has checked this
    return int(step)


def number_or_none(value: object) -> float | None:
    """Return a number as a float; None for any other value, such as the null that means NaN."""
    return float(value) if is_number(value) else None


def without_clock(row: Mapping[str, JsonValue]) -> MetricsRow:
    """Return a row without the figures of `CLOCK_PREFIXES`, in which even equal runs differ."""
    return {name: value for name, value in row.items() if not name.startswith(CLOCK_PREFIXES)}


def first_differing_figure(
    first_row: Mapping[str, JsonValue], second_row: Mapping[str, JsonValue]
) -> str | None:
    """Return the name of the first figure in which two rows differ; None if they are equal.

    Figures that depend on the clock are not compared. A null, which stands for NaN and infinities
    in the file, equals only null. In rows that were never written to a file, NaN equals NaN.
    """
    first = without_clock(first_row)
    second = without_clock(second_row)
    for name in dict.fromkeys([*first, *second]):
        is_in_both = name in first and name in second
        if not is_in_both or not is_same(first[name], second[name]):
            return name
    return None


def first_differing_row(
    first_rows: Sequence[MetricsRow], second_rows: Sequence[MetricsRow]
) -> str | None:
    """Return a clause on the first row in which two runs differ; None if all rows are equal.

    The clause names the row, the figure and both values. Figures that depend on the clock are not
    compared. If one run has more rows, and the rows before them are equal, the clause has the
    numbers of rows.
    """
    for first_row, second_row in zip(first_rows, second_rows, strict=False):
        name = first_differing_figure(first_row, second_row)
        if name is not None:
            return (
                f"the row of update {first_row.get(STEP)} has {name} "
                f"{figure_in_words(first_row, name)} and {figure_in_words(second_row, name)}"
            )
    if len(first_rows) != len(second_rows):
        return f"the runs have {len(first_rows)} and {len(second_rows)} rows"
    return None


def figure_in_words(row: Mapping[str, JsonValue], name: str) -> str:
    """Return a figure of a row for a sentence, also if the row lacks it or has null for it."""
    if name not in row:
        return "(missing)"
    return "(NaN or infinite)" if row[name] is None else str(row[name])


def is_same(first: JsonValue, second: JsonValue) -> bool:
    """Return whether two figures are equal. Unlike in Python, NaN equals NaN here."""
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return first == second
