"""The curves of runs, and the means over groups, as JSON for the web page."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import TypedDict

from common.metric_names import STEP, TRAINING_SECONDS
from common.system.printable import printable
from common.tools.compare.comparison import Comparison
from common.tools.compare.curves import X_AXES, Curve, curve_of, is_finite, mean_curve
from common.tools.compare.groups import RunGroup
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.thinning import kept_indices

DIGITS = 6  # significant digits of a value
DECIMALS_OF_SECONDS = 3  # decimals of a time in seconds

Column = list[float | None]


class ThinCurve(TypedDict):
    """A metric of one run."""

    places: list[int] | None  # indices in the columns of `RunCurves.x`; None: all of them
    y: list[float]


class RunCurves(TypedDict):
    """The curves of one run."""

    name: str
    x: dict[str, Column]  # a column for each of `X_AXES`; None where a row lacks the value
    curves: dict[str, ThinCurve]  # by the metric's name


class MeanCurve(TypedDict):
    """The mean of a metric over those runs of a group that logged it, at their common updates."""

    count: int  # number of these runs
    x: dict[str, Column]
    y: list[float]
    deviation: list[float]


def curves_of(run: RunRecord, names: Sequence[str], limit: int) -> RunCurves:
    """Return the curves of a run. Curves with the same points share the columns of the x-axes."""
    rows_of_metrics = {name: rows_of_curve(run, name, limit) for name in names}
    kept_rows = sorted(set(chain(*rows_of_metrics.values())))
    column_indices = {row: index for index, row in enumerate(kept_rows)}
    curves: dict[str, ThinCurve] = {}
    for name, rows in rows_of_metrics.items():
        indices = None
        if len(rows) < len(kept_rows):
            indices = [column_indices[row] for row in rows]
        values = [rounded(run.rows[row][name]) for row in rows]
        curves[printable(name)] = {"places": indices, "y": values}
    x = {
        x_name: [position(run.rows[row].get(x_name), x_name) for row in kept_rows]
        for x_name in X_AXES
    }
    return {"name": printable(run.name), "x": x, "curves": curves}


def rows_of_curve(run: RunRecord, name: str, limit: int) -> list[int]:
    """Return the indices of the rows that a metric's curve consists of."""
    finite_rows = [index for index, row in enumerate(run.rows) if is_finite(row.get(name))]
    values = [run.rows[index][name] for index in finite_rows]
    return [finite_rows[index] for index in kept_indices([values], limit)]


def means_of(
    comparison: Comparison, group: RunGroup, names: Sequence[str], limit: int
) -> dict[str, MeanCurve]:
    """Return the mean of each metric that several runs of a group logged at the same updates.

    Args:
        limit: the most points of a curve.
    """
    means: dict[str, MeanCurve] = {}
    if len(group.run_indices) < 2:
        return means
    runs = [comparison.runs[index] for index in group.run_indices]
    for name in names:
        mean = mean_of(runs, name, limit)
        if mean is not None:
            means[printable(name)] = mean
    return means


def mean_of(runs: Sequence[RunRecord], name: str, limit: int) -> MeanCurve | None:
    """Return the mean of a metric over the runs that logged it; None without a common update.

    Args:
        limit: the most points of the curve.
    """
    runs_with_curve: list[RunRecord] = []
    curves: list[Curve] = []
    for run in runs:
        curve = curve_of(run, name, STEP)
        if curve:
            runs_with_curve.append(run)
            curves.append(curve)
    if len(curves) < 2:
        return None
    points = mean_curve(curves)
    if not points:
        return None
    # The page draws a band around the mean. Its edges decide which points stay.
    lows = [point.mean - point.deviation for point in points]
    highs = [point.mean + point.deviation for point in points]
    kept_points = [points[index] for index in kept_indices([lows, highs], limit)]
    steps = [point.step for point in kept_points]
    return {
        "count": len(curves),
        "x": {x_name: mean_positions(runs_with_curve, x_name, steps) for x_name in X_AXES},
        "y": [rounded(point.mean) for point in kept_points],
        "deviation": [rounded(point.deviation) for point in kept_points],
    }


def mean_positions(runs: Sequence[RunRecord], x_name: str, steps: Sequence[float]) -> Column:
    """Return the mean x-position of runs at each step; None where a run has no position."""
    positions_by_step = [{row[STEP]: row.get(x_name) for row in run.rows} for run in runs]
    column: Column = []
    for step in steps:
        positions = [positions_of_run[step] for positions_of_run in positions_by_step]
        known = [value for value in positions if value is not None and is_finite(value)]
        mean = fmean(known) if len(known) == len(runs) else None
        column.append(position(mean, x_name))
    return column


def rounded(value: float) -> float:
    """Return a finite value with `DIGITS` significant digits."""
    return without_decimal_point(float(f"{value:.{DIGITS}g}"))


def position(value: float | None, x_name: str) -> float | None:
    """Return a position on an x-axis, rounded if it is a time; None if unknown or not finite."""
    if value is None or not is_finite(value):
        return None
    if x_name == TRAINING_SECONDS:
        value = round(value, DECIMALS_OF_SECONDS)
    return without_decimal_point(value)


def without_decimal_point(value: float) -> float:
    """Return a whole number below 2**53 as an integer, which has fewer characters in JSON."""
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return value
