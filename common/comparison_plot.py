"""Draw runs side by side: loss and accuracy against steps, samples and time; speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from common.comparison import Comparison
from common.errors import UserError
from common.run_record import RunRecord

# Okabe and Ito's, which people with colour blindness can tell apart.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")  # the second time round
AXES = {
    "progress/global_step": "updates",
    "progress/samples": "samples",
    "time/train_seconds": "training time, s",
}
CURVES = {"loss": ("train/loss", "eval/loss"), "accuracy": ("train/accuracy", "eval/accuracy")}
TRAINING: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5}
EVALUATION: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
LONGEST_NAME = 36  # characters of a run's name in the legend


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Write a picture of the comparison.

    Args:
        file: its name ends as the format is called: .png, .svg or .pdf.
    Raises:
        UserError: for a format that can't be drawn, or a file that can't be written.
    """
    runs, figures = comparison.runs, comparison.figures
    labels = [short(run.name) for run in runs]
    columns = legend_columns(labels)
    legend_height = 0.25 * -(-(len(runs) + 2) // columns)
    heights = [6.4 + legend_height, 0.8 + 0.3 * len(runs)]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained", dpi=110)
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    upper, lower = parts
    panels = upper.subplots(2, 3, sharey="row")
    for row, (what, metrics) in zip(panels, CURVES.items(), strict=True):
        row[0].set_ylabel(what)
        for axes, axis in zip(row, AXES, strict=True):
            draw_curves(axes, runs, metrics, axis)
    upper.legend(
        handles=legend_handles(labels),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=10,
    )
    left, right = lower.subplots(1, 2, sharey=True)
    draw_bars(left, [own["samples_per_second"] for own in figures], "throughput, samples/s")
    memory = f"peak memory, MiB ({' and '.join(memory_kinds(comparison))})"
    draw_bars(right, [own["peak_memory_mib"] for own in figures], memory)
    left.set_yticks(range(len(labels)), labels, fontsize=9)
    left.invert_yaxis()  # the baseline on top
    save(figure, file)


def legend_handles(labels: Sequence[str]) -> list[Line2D]:
    """Return what the legend shows: a line a run, and the two kinds of curves."""
    names = [f"{label} (baseline)" if not index else label for index, label in enumerate(labels)]
    handles = [
        Line2D([], [], color=colour(index), linestyle=dash(index), linewidth=2, label=name)
        for index, name in enumerate(names if len(names) > 1 else labels)
    ]
    handles.append(Line2D([], [], color="grey", **TRAINING, label="training"))
    handles.append(Line2D([], [], color="grey", **EVALUATION, label="evaluation"))
    return handles


def draw_curves(axes: Axes, runs: Sequence[RunRecord], metrics: Sequence[str], axis: str) -> None:
    """Draw the training and the evaluation curve of each run against one axis."""
    absent = 0
    for index, run in enumerate(runs):
        drawn = 0
        for metric, style in zip(metrics, (TRAINING, EVALUATION), strict=True):
            positions, values = run.series(metric, axis)
            axes.plot(positions, values, color=colour(index), linestyle=dash(index), **style)
            drawn += len(positions)
        absent += not drawn
    axes.set_xlabel(AXES[axis])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if absent:
        what = "time isn't logged" if axis == "time/train_seconds" else "nothing is logged"
        whose = "" if absent == len(runs) else f" by {absent} of {len(runs)} runs"
        axes.set_title(what + whose, fontsize=9, color="dimgrey")
    if absent == len(runs):
        axes.set_xticks([])
        return
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis == "progress/global_step"))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def draw_bars(axes: Axes, values: Sequence[float | None], title: str) -> None:
    """Draw one figure of each run as a bar, with its value; an unknown one has none."""
    lengths = [value or 0.0 for value in values]
    bars = axes.barh(range(len(values)), lengths, color=[colour(i) for i in range(len(values))])
    texts = ["not known" if value is None else f"{value:,.0f}" for value in values]
    axes.bar_label(bars, labels=texts, padding=4, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, 1.15 * max(lengths) or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.spines[["top", "right"]].set_visible(False)


def memory_kinds(comparison: Comparison) -> list[str]:
    """Return whose memory the runs report: the device's, the host's, or both."""
    kinds = {own["memory_kind"] for own in comparison.figures} - {None}
    return sorted(kinds) or ["not known"]


def save(figure: Figure, file: Path) -> None:
    """Write a figure; see `plot_comparison`."""
    if file.suffix[1:].lower() not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise UserError(f"--plot {file}: its name must end in .png, .svg or .pdf")
    try:
        figure.savefig(file)
    except OSError as problem:
        raise UserError(f"--plot {file} can't be written: {problem.strerror}") from None


def colour(index: int) -> str:
    """Return the colour of a run."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> Literal["-", "--", ":", "-."]:
    """Return the dashes of a run's lines."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def legend_columns(labels: Sequence[str]) -> int:
    """Return how many runs' names stand side by side over the picture."""
    longest = max(len(f"{labels[0]} (baseline)"), *map(len, labels))
    return max(1, min(len(labels) + 2, 120 // (longest + 6)))


def short(name: str) -> str:
    """Leave out the middle of a long name: runs differ at its beginning or its end."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def thousands(value: float, position: int | None = None) -> str:
    """Return a tick's label: 12000 as 12k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"
