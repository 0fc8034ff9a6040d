"""Draw runs side by side: loss and objective against steps, samples and time; speed and memory."""

import itertools
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from common.errors import UserError
from common.files import writing
from common.objective import PREFIXES
from common.tools.compare.comparison import Comparison
from common.tools.compare.readers import RunRecord
from common.track.names import PEAK, STEP, describe

# The colours of Okabe and Ito, which people with colour blindness can tell apart. If there are more
# runs than colours, lines become dashed.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
Style = dict[str, Any]  # arguments for matplotlib's `plot`
STYLES: list[Style] = [
    {"linestyle": dashes, "color": colour} for dashes in DASHES for colour in COLOURS
]
TRAINING: Style = {"linewidth": 1.0, "alpha": 0.5}
EVALUATION: Style = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
X_AXES = {STEP: "updates", "progress/samples": "samples", "time/train_seconds": "training time"}
BARS = ("perf/samples_per_second", PEAK)
LONGEST_NAME = 36  # characters of a run's name in the legend


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Draw a comparison: a row of curves for the loss and each objective, then bars and a legend.

    A row has one place for each of `X_AXES`. The last row has the two charts of `BARS`, and the
    legend in the third place.

    Raises:
        UserError: the file's suffix is no image format, or the file can't be written.
    """
    runs = comparison.runs
    styles = list(itertools.islice(itertools.cycle(STYLES), len(runs)))
    metrics = list(dict.fromkeys(["loss", *(run.objective.metric for run in runs)]))
    row_count = len(metrics) + 1
    figure = Figure(figsize=(13, 3.4 * row_count), layout="constrained", dpi=110)
    *curve_rows, (*bar_axes, legend_axes) = figure.subplots(row_count, len(X_AXES), sharey="row")
    for axes_row, metric in zip(curve_rows, metrics, strict=True):
        axes_row[0].set_ylabel(describe(metric).heading)
        for axes, x_name in zip(axes_row, X_AXES, strict=True):
            draw_curves(axes, runs, styles, metric, x_name)
    for axes, name in zip(bar_axes, BARS, strict=True):
        draw_bars(axes, comparison, styles, name)
    # Both charts of bars share their y-axis, so these settings are for both.
    bar_axes[0].set_yticks([])
    bar_axes[0].invert_yaxis()  # the baseline on top, as in the legend beside it
    draw_legend(legend_axes, runs, styles)
    if file.suffix[1:].lower() not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise UserError(
            f"--plot {file} is no format that can be drawn",
            advice="pass a name that ends in .png, .svg or .pdf",
        )
    with writing(f"--plot {file}"):
        figure.savefig(file)


def draw_curves(
    axes: Axes, runs: list[RunRecord], styles: list[Style], metric: str, x_name: str
) -> None:
    """Draw a metric of all runs, in training and in evaluation, over one measure of progress.

    Args:
        axes: where to draw.
        runs: the runs, the baseline first.
        styles: the style of each run.
        metric: without its split, such as ``accuracy``.
        x_name: a key of `X_AXES`.
    """
    point_count = 0
    for run, style in zip(runs, styles, strict=True):
        for prefix, stage_style in (("train", TRAINING), (PREFIXES[run.splits[0]], EVALUATION)):
            name = f"{prefix}/{metric}"
            rows = [row for row in run.rows if x_name in row and name in row]
            x_values = [row[x_name] for row in rows]
            axes.plot(x_values, [row[name] for row in rows], **style, **stage_style)
            point_count += len(rows)
    axes.set_xlabel(X_AXES[x_name])
    axes.grid(alpha=0.25)
    if point_count == 0:
        axes.set_title("not logged", fontsize=9, color="dimgrey")
        axes.set_xticks([])
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_name == STEP))
        unit = "s" if x_name == "time/train_seconds" else ""
        axes.xaxis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))


def draw_bars(axes: Axes, comparison: Comparison, styles: list[Style], name: str) -> None:
    """Draw a bar for each run's value of a figure; a run without a value gets an empty bar."""
    metric = describe(name)
    values = [figures[name] for figures in comparison.figures]
    lengths = [value or 0.0 for value in values]
    colours = [style["color"] for style in styles]
    bars = axes.barh(range(len(values)), lengths, color=colours)
    axes.bar_label(bars, labels=[metric.text(value) for value in values], padding=4)
    # The title of the memory chart says whose memory it shows.
    memory_kinds = {figures["memory_kind"] for figures in comparison.figures} - {None}
    title_parts = [metric.heading, *(sorted(memory_kinds) if name == PEAK else [])]
    axes.set_title(", ".join(title_parts))
    axes.set_xlim(0, 1.3 * max(lengths) or 1)  # room for the labels; 1 if all bars are empty
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_legend(axes: Axes, runs: list[RunRecord], styles: list[Style]) -> None:
    """Fill a part of the figure with a legend: the runs' colours, and the lines of both stages."""
    names = [shortened(run.name) for run in runs]
    if len(names) > 1:
        names[0] += " (baseline)"
    handles = []
    for name, style in zip(names, styles, strict=True):
        handles += axes.plot([], label=name, **style)
    for label, stage_style in (("training", TRAINING), ("evaluation", EVALUATION)):
        handles += axes.plot([], color="grey", label=label, **stage_style)
    axes.legend(handles=handles, loc="center", frameon=False)
    axes.axis("off")


def shortened(name: str) -> str:
    """Leave out the middle of a long name: runs differ at its beginning or its end."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"
