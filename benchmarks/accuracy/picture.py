"""Draws the accuracy over time of both sides, one chart for each data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from benchmarks.accuracy.goals import Goal
from benchmarks.accuracy.records import Evaluation
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.workloads import WORKLOADS, Recipe, Workload

# The colours of Okabe and Ito, which people with colour blindness can tell apart.
RECIPE_COLOURS = ("#d55e00", "#e69f00")
PEER_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#cc79a7")
CHARTS_IN_A_ROW = 2
MARGIN_BELOW = 1.5  # how far the chart goes below the first goal, in shares of the errors there
MINUTE = 60
HOUR = 3600
SECONDS = [10, 20, 30]
MINUTES = [1, 2, 5, 10, 20]
HOURS = [1, 2, 5, 10, 20, 50, 100]
TIMES = SECONDS + [MINUTE * count for count in MINUTES] + [HOUR * count for count in HOURS]
MAX_TICKS = 6  # of an axis; labels of more ticks would overlap
Style = dict[str, Any]  # arguments for matplotlib's `plot`


def draw(results: Results, file: Path) -> None:
    """Draw all data sets for which there are runs."""
    workloads = [
        workload
        for workload in WORKLOADS.values()
        if any(run.workload == workload.name for run in results.runs.values())
    ]
    columns = min(CHARTS_IN_A_ROW, len(workloads))
    rows = -(-len(workloads) // columns)
    # In an SVG, letters stay letters, and the same results give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "time-to-accuracy"}):
        figure = Figure(figsize=(5.2 * columns, 3.9 * rows), layout="constrained")
        charts = figure.subplots(rows, columns, squeeze=False).flatten()
        for chart, workload in zip(charts, workloads, strict=False):
            draw_workload(chart, results, workload)
        for chart in charts[len(workloads) :]:
            chart.axis("off")
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, facecolor="white", metadata=metadata)


def draw_workload(chart: Axes, results: Results, workload: Workload) -> None:
    """Draw the runs of one data set over a logarithmic time."""
    recipe_colours = iter(RECIPE_COLOURS)
    peer_colours = iter(PEER_COLOURS)
    for contestant in workload.contestants:
        is_recipe = isinstance(contestant, Recipe)
        colour = next(recipe_colours if is_recipe else peer_colours)
        label = contestant.name
        for run in results.of(workload.name, contestant.name):
            is_computed = run.trial is not None
            entries = results.evaluations(workload, run)
            name = f"{label} (computed)" if is_computed else label
            draw_run(chart, entries, name, line_style(colour, is_recipe, is_computed))
            if entries:
                label = "_"  # one entry in the legend for all seeds
    for goal in workload.goals:
        draw_goal(chart, goal)
    finish_chart(chart, workload)


def line_style(colour: str, is_recipe: bool, is_computed: bool) -> Style:
    """Return the look of a run: recipes are thick, computed times are dotted and hollow."""
    return {
        "color": colour,
        "linewidth": 2.2 if is_recipe else 1.4,
        "linestyle": ":" if is_computed else "-",
        "marker": "o",
        "markersize": 4,
        "markerfacecolor": "white" if is_computed else colour,
    }


def draw_run(chart: Axes, entries: Sequence[Evaluation], label: str, style: Style) -> None:
    """Draw the accuracy of a run, and as stars that with test-time augmentation, where known.

    Test-time augmentation is used at the end only, so it is not a point of the curve.
    """
    plain = [entry for entry in entries if "accuracy" in entry.figures]
    seconds = [entry.seconds for entry in plain]
    if entries:
        chart.plot(seconds, [entry.figures["accuracy"] for entry in plain], label=label, **style)
    for entry in entries:
        if "accuracy_tta" in entry.figures:
            star = style | {"marker": "*", "markersize": 9}
            chart.plot(entry.seconds, entry.figures["accuracy_tta"], **star)


def draw_goal(chart: Axes, goal: Goal) -> None:
    """Draw a goal's accuracy as a line."""
    chart.axhline(goal.least["accuracy"], color="0.6", linewidth=0.8, linestyle="--", zorder=0)


def finish_chart(chart: Axes, workload: Workload) -> None:
    """Set the axes, the title and the legend."""
    first_goal = min(goal.least["accuracy"] for goal in workload.goals)
    bottom = max(0.0, first_goal - MARGIN_BELOW * (1 - first_goal))
    chart.set_ylim(bottom, 1.0)
    chart.set_xscale("log")
    ticks = time_ticks(*chart.get_xlim())
    chart.set_xticks(ticks, [time_label(seconds) for seconds in ticks])
    chart.xaxis.set_minor_locator(NullLocator())
    chart.yaxis.set_major_formatter(PercentFormatter(1.0))
    chart.set_xlabel("time from the start of the command")
    chart.set_ylabel(f"accuracy on {workload.evaluated}")
    chart.set_title("; ".join(dict.fromkeys(goal.title for goal in workload.goals)), fontsize=9)
    chart.grid(alpha=0.25)
    chart.legend(fontsize=7, loc="lower right")


def time_ticks(earliest: float, latest: float) -> list[int]:
    """Return round times between two times, all in seconds; at most `MAX_TICKS`."""
    times = [seconds for seconds in TIMES if earliest <= seconds <= latest]
    stride = max(1, math.ceil(len(times) / MAX_TICKS))
    return times[::stride]


def time_label(seconds: int) -> str:
    """Return a round time, such as "20 s", "5 min" or "2 h"."""
    if seconds >= HOUR:
        return f"{seconds // HOUR} h"
    if seconds >= MINUTE:
        return f"{seconds // MINUTE} min"
    return f"{seconds} s"
