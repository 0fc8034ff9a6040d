"""The picture of a comparison: curves against updates, samples and time, and bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.comparison import Comparison
from common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "progress/global_step": "updates",
    "progress/samples": "samples",
    "time/train_seconds": "training time, s",
}
CURVES = {"train/loss": "training loss", "eval/accuracy": "accuracy"}
BARS = {"samples_per_second": "throughput, samples/s", "peak_memory_mib": "peak memory, MiB"}


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw the runs and write the picture, as the ending of `path` says.

    Raises:
        UserError: when it can't be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    runs = comparison.runs
    colors = [colormaps["tab10" if len(runs) <= 10 else "viridis"](i) for i in shades(len(runs))]
    figure = Figure(figsize=(13, 11), layout="constrained")
    grid = figure.add_gridspec(3, 6, height_ratios=(3, 3, 1 + 0.25 * len(runs)))
    for row, (metric, label) in enumerate(CURVES.items()):
        for column, (axis, unit) in enumerate(AXES.items()):
            axes = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
            for run, color in zip(runs, colors, strict=True):
                positions, values = run.series(metric, axis)
                marker = "o" if len(values) < 40 else None
                axes.plot(positions, values, color=color, marker=marker, ms=3, label=run.name)
            axes.set(xlabel=unit, ylabel=label if column == 0 else "")
            axes.grid(alpha=0.3)
    for column, (name, label) in enumerate(BARS.items()):
        draw_bars(
            figure.add_subplot(grid[2, 3 * column : 3 * column + 3]),
            [figures[name] or 0.0 for figures in comparison.figures],
            [run.name for run in runs],
            colors,
            label,
        )
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(len(runs), 4))
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as problem:
        raise UserError(f"--plot {path} can't be written: {problem}") from None


def shades(count: int) -> list[Any]:
    """Return the places in a colour map: by number in a short one, else spread over a long one."""
    return list(range(count)) if count <= 10 else [i / (count - 1) for i in range(count)]


def draw_bars(
    axes: Axes, values: list[float], names: list[str], colors: list[Any], label: str
) -> None:
    """Draw a bar a run, the baseline on top, with its value at the end."""
    places = list(range(len(values)))
    bars = axes.barh(places, values, color=colors)
    axes.bar_label(bars, [f"{value:,.0f}" if value else "unknown" for value in values], padding=3)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(label)
