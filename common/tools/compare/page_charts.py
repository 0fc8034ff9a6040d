"""The charts of the web page as JSON: which metrics share one, and their order."""

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from common.system.printable import printable
from common.tools.compare.comparison import Comparison
from common.track.names import SPLITS, Metric, metric_named

STAGES = {"train": "training", "val": "validation", "test": "test"}


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


def charts_of(comparison: Comparison, metrics: Sequence[str]) -> list[Chart]:
    """Return the charts: first those of the loss and of each objective, then all others.

    When the page is opened, it shows only those of the loss and the objectives, or one other chart
    if there are none of these. The reader may open the rest.
    """
    series_of_charts: dict[str, list[Series]] = {}
    metric_of_key: dict[str, Metric] = {}
    for name in metrics:
        key, split = chart_and_split(name)
        metric_of_key[key] = metric_named(name)
        series_of_charts.setdefault(key, []).append(
            {"name": printable(name), "stage": STAGES.get(split, "")}
        )
    objective_metrics = [run.objective.metric for run in comparison.runs]
    shown_metrics = dict.fromkeys(["loss", *objective_metrics])
    first_keys = [key for key in shown_metrics if key in series_of_charts]
    other_keys = [key for key in series_of_charts if key not in first_keys]
    charts_by_heading = Counter(metric.heading for metric in metric_of_key.values())
    charts: list[Chart] = []
    for key in [*first_keys, *other_keys]:
        metric = metric_of_key[key]
        heading = metric.heading
        if charts_by_heading[heading] > 1:  # charts with the same heading also show their key
            heading += f" ({key})"
        charts.append(
            {
                "heading": printable(heading),
                "is_percent": metric.form.endswith("%"),
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
    if prefix in SPLITS and short_name:
        return short_name, prefix
    return name, ""
