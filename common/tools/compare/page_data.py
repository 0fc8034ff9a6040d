"""The curves of a comparison as JSON, for the script of the web page.

The texts are safe to show as text, but they are not escaped for HTML: the script never parses them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import TypedDict

from common.metric_names import STEP, TRAINING_SECONDS
from common.system.printable import printable
from common.tools.compare.comparison import Comparison
from common.tools.compare.curves import X_AXES, curve_of, is_finite, mean_curve
from common.tools.compare.group_table import group_labels
from common.tools.compare.groups import RunGroup
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.thinning import kept_indices, points_per_curve
from common.track.names import SPLITS, metric_named

MAX_POINTS = 2000  # points of a curve; a chart has fewer pixels than this
MIN_POINTS = 40  # points that a thinned curve keeps, however many curves there are
MAX_POINTS_IN_ALL = 60_000  # with 15 to 35 characters each, they keep the page below 2 MB
DIGITS = 6  # significant digits of a value
DECIMALS_OF_SECONDS = 3  # decimals of a time in seconds
STAGES = {"train": "training", "val": "validation", "test": "test"}
NO_CURVE = ("progress/", "time/")  # measures of progress, which are the x-axes of curves

Column = list[float | None]


class Series(TypedDict):
    """A metric as runs log it; a part of a chart."""

    name: str  # such as "val/loss"
    stage: str  # "training", "validation" or "test"; empty for a metric without a split


class Chart(TypedDict):
    """Metrics that share a y-axis, such as the loss in training and in evaluation."""

    heading: str  # includes the unit
    is_percent: bool
    is_shown: bool  # whether the page shows it from the start
    series: list[Series]


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


class GroupCurves(TypedDict):
    """A group of runs that differ in the seed alone."""

    label: str
    runs: list[int]  # indices in `PageData.runs`
    means: dict[str, MeanCurve]  # by the metric's name; empty for a single run


class PageData(TypedDict):
    """Everything that the script of the page reads."""

    axes: list[dict[str, str]]  # key and heading of each of `X_AXES`
    charts: list[Chart]
    groups: list[GroupCurves]
    runs: list[RunCurves]


def page_data(comparison: Comparison) -> PageData:
    """Return all that the page shows: axes, charts, the curves of each run, and groups' means.

    Long curves are thinned. Values are rounded to `DIGITS` significant digits. Of the positions on
    the x-axes, times are rounded to milliseconds, and updates and samples are exact.
    """
    runs = comparison.runs
    metrics_of_runs = [metric_names(run) for run in runs]
    all_metrics = list(dict.fromkeys(chain(*metrics_of_runs)))
    limit = limit_of_points(comparison, metrics_of_runs)
    labels = group_labels(comparison)
    return {
        "axes": [{"key": name, "heading": heading} for name, heading in X_AXES.items()],
        "charts": charts_of(comparison, all_metrics),
        "groups": [
            {
                "label": printable(label),
                "runs": list(group.run_indices),
                "means": means_of(comparison, group, all_metrics, limit),
            }
            for label, group in zip(labels, comparison.groups, strict=True)
        ],
        "runs": [
            curves_of(run, names, limit) for run, names in zip(runs, metrics_of_runs, strict=True)
        ],
    }


def metric_names(run: RunRecord) -> list[str]:
    """Return the names of the metrics that have a curve, in the order in which they appear."""
    logged_names = dict.fromkeys(chain(*run.rows))
    names = [name for name in logged_names if not name.startswith(NO_CURVE)]
    return [name for name in names if any(is_finite(row.get(name)) for row in run.rows)]


def limit_of_points(comparison: Comparison, metrics_of_runs: Sequence[Sequence[str]]) -> int:
    """Return the largest number of points of a curve with which the page stays small enough."""
    lengths: list[int] = []
    for run, names in zip(comparison.runs, metrics_of_runs, strict=True):
        counts = Counter(name for row in run.rows for name in row)
        lengths.extend(counts[name] for name in names)
    for group in comparison.groups:
        if len(group.run_indices) > 1:
            # The group's mean has a curve for each metric, about as long as that of its first run.
            # A point of a mean takes as much space as two points of a run.
            first_index = group.run_indices[0]
            length_of_mean = 2 * len(comparison.runs[first_index].rows)
            lengths.extend(length_of_mean for _ in metrics_of_runs[first_index])
    return points_per_curve(lengths, MAX_POINTS, MIN_POINTS, MAX_POINTS_IN_ALL)


# --------------------------------------------------------------------------------------- Charts


def charts_of(comparison: Comparison, metrics: Sequence[str]) -> list[Chart]:
    """Return the charts: first those of the loss and of each objective, then all others.

    When the page is opened, it shows only those of the loss and the objectives, or one other chart
    if there are none of these. The reader may open the rest.
    """
    series_of_charts: dict[str, list[Series]] = {}
    for name in metrics:
        key, split = chart_and_split(name)
        series_of_charts.setdefault(key, []).append(
            {"name": printable(name), "stage": STAGES.get(split, "")}
        )
    shown_metrics = dict.fromkeys(["loss", *(run.objective.metric for run in comparison.runs)])
    first_keys = [key for key in shown_metrics if key in series_of_charts]
    keys = [*first_keys, *(key for key in series_of_charts if key not in first_keys)]
    metric_of_key = {chart_and_split(name)[0]: metric_named(name) for name in metrics}
    charts_by_heading = Counter(metric_of_key[key].heading for key in keys)
    charts: list[Chart] = []
    for key in keys:
        heading = metric_of_key[key].heading
        if charts_by_heading[heading] > 1:  # charts with the same heading also show their key
            heading += f" ({key})"
        charts.append(
            {
                "heading": printable(heading),
                "is_percent": metric_of_key[key].form.endswith("%"),
                "is_shown": key in first_keys,
                "series": series_of_charts[key],
            }
        )
    if charts and not first_keys:
        charts[0]["is_shown"] = True
    return charts


def chart_and_split(name: str) -> tuple[str, str]:
    """Return the key of a metric's chart, and its split if it has one; otherwise an empty text.

    The key is the name without the split, so one chart shows a metric in training and evaluation.
    """
    prefix, _, short_name = name.partition("/")
    return (short_name, prefix) if prefix in SPLITS and short_name else (name, "")


# --------------------------------------------------------------------------------------- Curves


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
    for name in names:
        runs = [comparison.runs[index] for index in group.run_indices]
        curves = [curve_of(run, name, STEP) for run in runs]
        logged_runs = [run for run, curve in zip(runs, curves, strict=True) if curve]
        points = mean_curve([curve for curve in curves if curve]) if len(logged_runs) > 1 else []
        if not points:
            continue
        # The page draws a band around the mean. Its edges decide which points stay.
        lows = [point.mean - point.deviation for point in points]
        highs = [point.mean + point.deviation for point in points]
        kept_points = [points[index] for index in kept_indices([lows, highs], limit)]
        steps = [point.step for point in kept_points]
        means[printable(name)] = {
            "count": len(logged_runs),
            "x": {x_name: mean_positions(logged_runs, x_name, steps) for x_name in X_AXES},
            "y": [rounded(point.mean) for point in kept_points],
            "deviation": [rounded(point.deviation) for point in kept_points],
        }
    return means


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
    return int(value) if value == int(value) and abs(value) < 2**53 else value
