"""The data of a comparison as JSON, for the script of the web page.

The texts are safe to show as text, but they are not escaped for HTML: the script never parses them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TypedDict

from common.system.printable import printable
from common.tools.compare.comparison import Comparison
from common.tools.compare.curves import X_AXES, is_finite
from common.tools.compare.group_table import group_labels
from common.tools.compare.page_charts import Chart, charts_of
from common.tools.compare.page_curves import MeanCurve, RunCurves, curves_of, means_of
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.thinning import points_per_curve

MAX_POINTS = 2000  # points of a curve; a chart has fewer pixels than this
MIN_POINTS = 40  # points that a thinned curve keeps, however many curves there are
MAX_POINTS_IN_ALL = 60_000  # with 15 to 35 characters each, they keep the page below 2 MB
NO_CURVE = ("progress/", "time/")  # measures of progress, which are the x-axes of curves


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

    Long curves are thinned. Values are rounded to significant digits: see `page_curves.DIGITS`. Of
    the positions on the x-axes, times are rounded to milliseconds, and updates and samples are
    exact.
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
