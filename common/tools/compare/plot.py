"""Draw runs side by side: loss and objective against steps, samples and time; speed and memory.

Runs of one group, which differ in the seed alone, share a colour. Their curves are thin, with a
thick line at their mean and a band of one standard deviation to each side.
"""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from common.errors import UserError
from common.failures.sentences import writing
from common.metric_names import STEP, THROUGHPUT, TRAINING_SECONDS
from common.objective import PREFIXES
from common.storage.files import require_writable
from common.tools.compare.comparison import Comparison
from common.tools.compare.curves import X_AXES, Curve, curve_of, mean_curve
from common.tools.compare.group_table import group_labels, has_repetitions, mean_and_deviation_text
from common.tools.compare.groups import RunGroup
from common.tools.compare.repetitions import Values, sample_of_runs
from common.tools.statistics.samples import Sample
from common.track.names import PEAK, metric_named

# The colours of Okabe and Ito, which people with colour blindness can tell apart. If there are more
# groups than colours, lines become dashed.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
# Arguments for matplotlib's functions, each of which has a type of its own.
Style = dict[str, Any]
STYLES: list[Style] = [
    {"linestyle": dashes, "color": colour} for dashes in DASHES for colour in COLOURS
]
TRAINING: Style = {"linewidth": 1.0, "alpha": 0.5}
EVALUATION: Style = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
SINGLE_SEED: Style = {"linewidth": 0.7, "alpha": 0.35}  # one curve of several in a group
BAND: Style = {"alpha": 0.15, "linewidth": 0}
BARS = (THROUGHPUT, PEAK)
NAME_WIDTH = 36  # characters in a line of a name in the legend
NAME_LINES = 3


def require_plot_path(file: Path) -> None:
    """Raise a `UserError` if a path has no suffix of an image format, or can't be written."""
    if file.suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise UserError(
            f"--plot {file} does not end in a supported suffix",
            advice="pass a name that ends in .png, .svg or .pdf",
        )
    require_writable(file, f"--plot {file}")


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Draw a comparison: a row of curves for the loss and each objective, then bars and a legend.

    Each row of curves has one chart for each of `X_AXES`. The last row has the two charts of `BARS`
    and the legend.

    Args:
        file: a path that `require_plot_path` accepts.

    Raises:
        UserError: the file can't be written.
    """
    styles = list(itertools.islice(itertools.cycle(STYLES), len(comparison.groups)))
    objective_metrics = [run.objective.metric for run in comparison.runs]
    metrics = list(dict.fromkeys(["loss", *objective_metrics]))
    row_count = len(metrics) + 1
    figure = Figure(figsize=(13, 3.4 * row_count), layout="constrained", dpi=110)
    # The last row is full, too: it has the charts of `BARS` and the legend, as many as `X_AXES`.
    *curve_rows, (*bar_axes, legend_axes) = figure.subplots(row_count, len(X_AXES), sharey="row")
    for axes_row, metric in zip(curve_rows, metrics, strict=True):
        axes_row[0].set_ylabel(metric_named(metric).heading)
        for axes, x_name in zip(axes_row, X_AXES, strict=True):
            draw_curves(axes, comparison, styles, metric, x_name)
    for axes, name in zip(bar_axes, BARS, strict=True):
        draw_bars(axes, comparison, styles, name)
    # The two charts of bars share their y-axis, so these settings are for both.
    bar_axes[0].set_yticks([])
    bar_axes[0].invert_yaxis()  # the baseline on top, as in the legend beside it
    draw_legend(legend_axes, comparison, styles)
    with writing(f"--plot {file}"):
        figure.savefig(file)


def draw_curves(
    axes: Axes, comparison: Comparison, styles: Sequence[Style], metric: str, x_name: str
) -> None:
    """Draw a metric of all runs, in training and in evaluation, over one measure of progress.

    Args:
        axes: where to draw.
        comparison: the runs, in groups.
        styles: the style of each group.
        metric: the metric's name without its split, such as ``accuracy``.
        x_name: a key of `X_AXES`.
    """
    point_count = 0
    for group, style in zip(comparison.groups, styles, strict=True):
        runs = [comparison.runs[index] for index in group.run_indices]
        split_in_training, _ = runs[0].splits
        evaluation_prefix = PREFIXES[split_in_training]
        for prefix, stage_style in (("train", TRAINING), (evaluation_prefix, EVALUATION)):
            curves = [curve_of(run, f"{prefix}/{metric}", x_name) for run in runs]
            draw_group(axes, curves, style, stage_style)
            point_count += sum(map(len, curves))
    axes.set_xlabel(X_AXES[x_name])
    axes.grid(alpha=0.25)
    if point_count == 0:
        axes.set_title("not logged", fontsize=9, color="dimgrey")
        axes.set_xticks([])
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_name == STEP))
        unit = "s" if x_name == TRAINING_SECONDS else ""
        axes.xaxis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))


def draw_group(axes: Axes, all_curves: Sequence[Curve], style: Style, stage_style: Style) -> None:
    """Draw the curves of a group; for several curves, add their mean and a band around it.

    The band extends by one standard deviation to each side. Mean and band cover the steps that all
    curves have. Curves without points are left out.
    """
    curves = [curve for curve in all_curves if curve]
    if len(curves) < 2:
        for curve in curves:
            x_values, y_values = zip(*curve.values(), strict=True)
            axes.plot(x_values, y_values, **style, **stage_style)
        return
    for curve in curves:
        x_values, y_values = zip(*curve.values(), strict=True)
        axes.plot(x_values, y_values, **{**style, **SINGLE_SEED})
    points = mean_curve(curves)
    mean_x_values = [point.x for point in points]
    lows = [point.mean - point.deviation for point in points]
    highs = [point.mean + point.deviation for point in points]
    axes.plot(mean_x_values, [point.mean for point in points], **style, **stage_style)
    axes.fill_between(mean_x_values, lows, highs, color=style["color"], **BAND)


def draw_bars(axes: Axes, comparison: Comparison, styles: Sequence[Style], name: str) -> None:
    """Draw a bar for each group's mean of a figure, with its standard deviation.

    A group without a value gets an empty bar.
    """
    metric = metric_named(name)
    values = [figures.metrics[name] for figures in comparison.figures]
    samples = [bar_sample(comparison, group, values) for group in comparison.groups]
    lengths = [sample.mean or 0.0 for sample in samples]
    errors = [sample.deviation or 0.0 for sample in samples]
    colours = [style["color"] for style in styles]
    error_bars: Style = {"xerr": errors, "error_kw": {"ecolor": "grey"}} if any(errors) else {}
    bars = axes.barh(range(len(samples)), lengths, color=colours, **error_bars)
    labels = [mean_and_deviation_text(metric, sample) for sample in samples]
    axes.bar_label(bars, labels=labels, padding=4)
    # The title of the memory chart says whose memory it shows.
    title_parts = [metric.heading]
    if name == PEAK:
        kinds = {figures.memory_kind for figures in comparison.figures}
        title_parts += sorted(kind for kind in kinds if kind is not None)
    axes.set_title(", ".join(title_parts))
    ends = [length + error for length, error in zip(lengths, errors, strict=True)]
    space_for_labels = 1.5 if any(errors) else 1.3
    axes.set_xlim(0, (space_for_labels * max(ends)) or 1)  # 1 if all bars are empty
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def bar_sample(comparison: Comparison, group: RunGroup, values: Values) -> Sample:
    """Describe a figure of a group's finished runs, or of all its runs if none has finished."""
    sample = sample_of_runs(comparison, group, values)
    if sample.count:
        return sample
    values_of_group = [values[index] for index in group.run_indices]
    return Sample.of([value for value in values_of_group if value is not None])


def draw_legend(axes: Axes, comparison: Comparison, styles: Sequence[Style]) -> None:
    """Fill a part of the figure with a legend: the groups' colours, and the styles of lines."""
    handles: list[Artist] = []
    for label, style in zip(group_labels(comparison), styles, strict=True):
        handles += axes.plot([], label=wrapped_name(label), **style)
    for label, stage_style in (("training", TRAINING), ("evaluation", EVALUATION)):
        handles += axes.plot([], color="grey", label=label, **stage_style)
    if has_repetitions(comparison):
        handles += axes.plot([], color="grey", label="single seed", **SINGLE_SEED)
        handles.append(Patch(color="grey", label="mean ± standard deviation", **BAND))
    axes.legend(handles=handles, loc="center", frameon=False)
    axes.axis("off")


def wrapped_name(name: str) -> str:
    """Break a long name into lines for the legend, without the middle of a very long one.

    Names of runs differ at their beginning or their end.
    """
    most_characters = NAME_WIDTH * NAME_LINES
    if len(name) > most_characters:
        half = most_characters // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return textwrap.fill(name, NAME_WIDTH)
