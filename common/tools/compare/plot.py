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

# Okabe and Ito's, which people with colour blindness can tell apart; dashes the second time round.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES = [{"linestyle": dash, "color": hue} for dash in ("-", "--", ":", "-.") for hue in COLOURS]
TRAINING: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5}
EVALUATION: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
AXES = {STEP: "updates", "progress/samples": "samples", "time/train_seconds": "training time"}
BARS = ("perf/samples_per_second", PEAK)
LONGEST_NAME = 36  # characters of a run's name in the legend


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Write a picture of the comparison; its name ends as the format is called: .png or .svg."""
    runs, figures = comparison.runs, comparison.figures
    styles: list[dict[str, Any]] = list(itertools.islice(itertools.cycle(STYLES), len(runs)))
    names = [short(run.name) for run in runs]
    names[0] += " (baseline)" if len(runs) > 1 else ""
    metrics = list(dict.fromkeys(["loss", *(run.objective.metric for run in runs)]))
    figure = Figure(figsize=(13, 3.4 * (len(metrics) + 1)), layout="constrained", dpi=110)
    *curves, (*bars, legend) = figure.subplots(len(metrics) + 1, len(AXES), sharey="row")
    for row, metric in zip(curves, metrics, strict=True):
        row[0].set_ylabel(describe(metric).heading)
        for axes, axis in zip(row, AXES, strict=True):
            draw_curves(axes, runs, styles, metric, axis)
    kinds = sorted({own["memory_kind"] for own in figures} - {None})
    for axes, name in zip(bars, BARS, strict=True):
        values = [own[name] for own in figures]
        lengths = [value or 0.0 for value in values]
        drawn = axes.barh(range(len(runs)), lengths, color=[style["color"] for style in styles])
        axes.bar_label(drawn, labels=[describe(name).text(value) for value in values], padding=4)
        axes.set_title(", ".join([describe(name).heading, *(kinds if name == PEAK else [])]))
        axes.set_xlim(0, 1.3 * max(lengths) or 1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    bars[0].set_yticks([])
    bars[0].invert_yaxis()  # the baseline on top, as in the legend beside
    handles = [legend.plot([], label=n, **style)[0] for n, style in zip(names, styles, strict=True)]
    for label, kind in (("training", TRAINING), ("evaluation", EVALUATION)):
        handles += legend.plot([], color="grey", label=label, **kind)
    legend.legend(handles=handles, loc="center", frameon=False)
    legend.axis("off")
    if file.suffix[1:].lower() not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise UserError(f"--plot {file}: its name must end in .png, .svg or .pdf")
    with writing(f"--plot {file}"):
        figure.savefig(file)


def draw_curves(
    axes: Axes, runs: list[RunRecord], styles: list[dict[str, Any]], metric: str, axis: str
) -> None:
    drawn = 0
    for run, style in zip(runs, styles, strict=True):
        for split, kind in (("train", TRAINING), (PREFIXES[run.splits[0]], EVALUATION)):
            rows = [row for row in run.rows if axis in row and f"{split}/{metric}" in row]
            values = [row[f"{split}/{metric}"] for row in rows]
            axes.plot([row[axis] for row in rows], values, **style, **kind)
            drawn += len(rows)
    axes.set_xlabel(AXES[axis])
    axes.grid(alpha=0.25)
    if not drawn:
        axes.set_title("not logged", fontsize=9, color="dimgrey")
        axes.set_xticks([])
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis == STEP))
        unit = "s" if axis == "time/train_seconds" else ""
        axes.xaxis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))


def short(name: str) -> str:
    """Leave out the middle of a long name: runs differ at its beginning or its end."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"
