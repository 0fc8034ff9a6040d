"""Draw runs side by side: loss and objective against steps, samples and time; speed and memory."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from common.compare.comparison import Comparison
from common.compare.readers import RunRecord
from common.errors import UserError
from common.files import writing
from common.objective import PREFIXES
from common.track.names import PEAK, STEP, describe

# Okabe and Ito's, which people with colour blindness can tell apart; dashes the second time round.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
TRAINING: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5}
EVALUATION: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
AXES = {STEP: "updates", "progress/samples": "samples", "time/train_seconds": "training time, s"}
SPEED = "perf/samples_per_second"
LONGEST_NAME = 36  # characters of a run's name in the legend


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Write a picture of the comparison; its name ends as the format is called: .png or .svg."""
    runs, figures = comparison.runs, comparison.figures
    styles: list[dict[str, Any]] = [
        {"color": COLOURS[n % len(COLOURS)], "linestyle": DASHES[n // len(COLOURS) % len(DASHES)]}
        for n in range(len(runs))
    ]
    names = [short(run.name) for run in runs]
    names[0] += " (baseline)" if len(runs) > 1 else ""
    handles = [Line2D([], [], label=n, **s) for n, s in zip(names, styles, strict=True)]
    for label, kind in (("training", TRAINING), ("evaluation", EVALUATION)):
        handles.append(Line2D([], [], color="grey", label=label, **kind))
    columns = max(1, min(len(handles), 120 // (max(map(len, names)) + 6)))
    metrics = list(dict.fromkeys(["loss", *(run.objective.metric for run in runs)]))
    heights = [3.2 * len(metrics) + 0.25 * -(-len(handles) // columns), 0.8 + 0.3 * len(runs)]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained", dpi=110)
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    panels = parts[0].subplots(len(metrics), len(AXES), sharey="row", squeeze=False)
    for row, metric in zip(panels, metrics, strict=True):
        row[0].set_ylabel(describe(metric).heading)
        for axes, axis in zip(row, AXES, strict=True):
            draw_curves(axes, runs, styles, metric, axis)
    parts[0].legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    left, right = parts[1].subplots(1, 2, sharey=True)
    kinds = sorted({own["memory_kind"] for own in figures} - {None}) or ["not known"]
    for axes, name, of in ((left, SPEED, ""), (right, PEAK, f" ({' and '.join(kinds)})")):
        values = [own[name] for own in figures]
        lengths = [value or 0.0 for value in values]
        bars = axes.barh(range(len(runs)), lengths, color=[style["color"] for style in styles])
        axes.bar_label(bars, labels=[describe(name).text(value) for value in values], padding=4)
        axes.set_title(describe(name).heading + of)
        axes.set_xlim(0, 1.15 * max(lengths) or 1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    left.set_yticks(range(len(runs)), names)
    left.invert_yaxis()  # the baseline on top
    if file.suffix[1:].lower() not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise UserError(f"--plot {file}: its name must end in .png, .svg or .pdf")
    with writing(f"--plot {file}"):
        figure.savefig(file)


def draw_curves(
    axes: Axes, runs: list[RunRecord], styles: list[dict[str, Any]], metric: str, axis: str
) -> None:
    """Draw the training and the evaluation curve of each run against one axis."""
    absent = 0
    for run, style in zip(runs, styles, strict=True):
        drawn = 0
        for split, kind in (("train", TRAINING), (PREFIXES[run.splits[0]], EVALUATION)):
            rows = [row for row in run.rows if axis in row and f"{split}/{metric}" in row]
            values = [row[f"{split}/{metric}"] for row in rows]
            axes.plot([row[axis] for row in rows], values, **style, **kind)
            drawn += len(rows)
        absent += not drawn
    axes.set_xlabel(AXES[axis])
    axes.grid(alpha=0.25)
    if absent:
        whose = "" if absent == len(runs) else f" by {absent} of {len(runs)} runs"
        axes.set_title(f"not logged{whose}", fontsize=9, color="dimgrey")
    if absent == len(runs):
        axes.set_xticks([])
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis == STEP))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def short(name: str) -> str:
    """Leave out the middle of a long name: runs differ at its beginning or its end."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"
