"""Reads the rows of `metrics.jsonl`, and finds the first figure in which two rows differ."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from common.json_files import read_lines
from common.run_directory.records import METRICS_FILE, is_number
from common.track.names import STEP

# The figures that depend on the clock or on the state of the machine.
OF_THE_CLOCK = ("perf/", "memory/", "gpu/", "time/")
Row = dict[str, JsonValue]  # figures by name; null stands for NaN and infinities


def read_rows(directory: Path) -> list[Row]:
    """Return the rows of the run in a directory, in the order of the file.

    The list is empty for a run without rows. A last line that is only half written is left out.

    Raises:
        UserError: another line is damaged.
    """
    return read_lines(directory / METRICS_FILE, STEP)


def step_of(row: Mapping[str, JsonValue]) -> int:
    """Return the update of a row."""
    step = row[STEP]
    assert is_number(step)  # `read_lines` has checked it
    return int(step)


def number_or_none(value: object) -> float | None:
    """Return a value that is a number; None for anything else. Rows have null for NaN."""
    return float(value) if is_number(value) else None


def without_clock(row: Mapping[str, JsonValue]) -> Row:
    """Return a row without the figures that depend on the clock."""
    return {name: value for name, value in row.items() if not name.startswith(OF_THE_CLOCK)}


def first_differing_figure(
    before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]
) -> str | None:
    """Return the name of the first figure in which two rows differ; None if they are equal.

    Figures that depend on the clock are not compared. NaN, which is null in rows, equals only NaN.
    """
    first = without_clock(before)
    second = without_clock(now)
    for name in dict.fromkeys([*first, *second]):
        is_in_both = name in first and name in second
        if not is_in_both or not is_same(first[name], second[name]):
            return name
    return None


def first_differing_row(first: Sequence[Row], second: Sequence[Row]) -> str | None:
    """Return in words where two runs' rows differ first; None if all figures are equal."""
    for before, now in zip(first, second, strict=False):
        name = first_differing_figure(before, now)
        if name is not None:
            return (
                f"the row of update {before.get(STEP)} has {name} "
                f"{before.get(name)} and {now.get(name)}"
            )
    if len(first) != len(second):
        return f"there are {len(first)} and {len(second)} rows"
    return None


def is_same(first: JsonValue, second: JsonValue) -> bool:
    """Whether two figures are equal; NaN equals NaN."""
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return first == second
