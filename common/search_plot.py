"""Draw a search: what each trial reached, which flags mattered, and where the good values lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from optuna.trial import TrialState

from common.search_space import Dimension

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

# How a trial ended: its mark and colour.
STYLES: dict[TrialState, dict[str, Any]] = {
    TrialState.COMPLETE: {"marker": "o", "color": "#0072b2", "label": "finished"},
    TrialState.PRUNED: {"marker": "x", "color": "#e69f00", "label": "pruned, where it was stopped"},
}
PANELS = 3  # side by side
FEWEST = 4  # finished trials from which one may guess what mattered


def plot_search(study: Study, dimensions: Sequence[Dimension], file: Path) -> None:
    """Write a picture of all trials that were evaluated at least once.

    Args:
        file: its name ends in .png, .svg or .pdf.
    """
    trials = [trial for trial in study.trials if trial.state in STYLES and reached(trial)]
    names = [dimension.flag.removeprefix("--") for dimension in dimensions]
    importance = importances(study, names)
    rows = -(-len(dimensions) // PANELS)
    figure = Figure(figsize=(13, 4.2 + 3.4 * rows), layout="constrained", dpi=110)
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.2, 3.4 * rows])
    upper, lower = parts
    if importance:
        history, bars = upper.subplots(1, 2, width_ratios=[2, 1])
        draw_importance(bars, importance)
    else:
        history = upper.subplots()
    draw_history(history, trials, len(study.trials))
    line = Line2D([], [], color="black", linewidth=1, label="best so far")
    marks = [Line2D([], [], linestyle="", **style) for style in STYLES.values()]
    upper.legend(handles=[*marks, line], loc="outside upper left", ncols=3, frameon=False)
    columns = min(PANELS, len(dimensions))
    panels: Any = lower.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, dimension in zip(panels.flat, dimensions, strict=False):
        draw_slice(axes, trials, dimension)
    for row in panels:
        row[0].set_ylabel("validation accuracy")
    for axes in list(panels.flat)[len(dimensions) :]:
        axes.set_visible(False)
    figure.savefig(file)


def reached(trial: FrozenTrial) -> float:
    """Return a trial's accuracy: its best, or that at which it was stopped; 0 before the first."""
    if trial.state == TrialState.COMPLETE:
        return trial.value or 0.0
    last = max(trial.intermediate_values, default=None)
    return 0.0 if last is None else trial.intermediate_values[last]


def importances(study: Study, names: Sequence[str]) -> dict[str, float]:
    """Return each flag's share in how the accuracies differ; empty where trials are too few."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(finished) < FEWEST or len(names) < 2:
        return {}
    try:
        return dict(optuna.importance.get_param_importances(study, params=list(names)))
    except (ValueError, RuntimeError):  # all reached the same
        return {}


def draw_history(axes: Axes, trials: Sequence[FrozenTrial], count: int) -> None:
    """Draw what each trial reached, and the best so far."""
    for state, style in STYLES.items():
        found = [trial for trial in trials if trial.state == state]
        axes.plot(
            [trial.number for trial in found], [reached(t) for t in found], linestyle="", **style
        )
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    levels = [max(reached(t) for t in finished if t.number <= at.number) for at in finished]
    positions = [trial.number for trial in finished]
    axes.step(
        [*positions, count - 1], [*levels, *levels[-1:]], where="post", color="black", linewidth=1
    )
    axes.set_xlabel("trial")
    axes.set_ylabel("validation accuracy")
    axes.set_xlim(-0.5, count - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    finish(axes)


def draw_importance(axes: Axes, importance: dict[str, float]) -> None:
    """Draw how much each flag mattered."""
    names = sorted(importance, key=lambda name: importance[name])
    bars = axes.barh(names, [importance[name] for name in names], color="#009e73")
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9)
    axes.set_xlim(0, 1.15 * max(importance.values()) or 1)
    axes.set_xlabel("share of the differences explained (PED-ANOVA)")
    finish(axes)


def draw_slice(axes: Axes, trials: Sequence[FrozenTrial], dimension: Dimension) -> None:
    """Draw the accuracies over the values of one flag."""
    name = dimension.flag.removeprefix("--")
    for state, style in STYLES.items():
        found = [trial for trial in trials if trial.state == state and name in trial.params]
        values = [trial.params[name] for trial in found]
        if dimension.choices:
            values = [dimension.choices.index(value) for value in values]
        axes.plot(values, [reached(trial) for trial in found], linestyle="", alpha=0.8, **style)
    if dimension.choices:
        axes.set_xticks(range(len(dimension.choices)), dimension.choices)
        axes.set_xlim(-0.5, len(dimension.choices) - 0.5)
    elif dimension.is_log:
        axes.set_xscale("log")
    axes.set_xlabel(name)
    finish(axes)


def finish(axes: Axes) -> None:
    """Draw the grid behind the data, and no frame."""
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
