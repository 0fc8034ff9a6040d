"""The rows of figures that tables of runs and of groups have."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from common.tools.compare.comparison import FIGURES, RATIOS, Comparison
from common.track.names import EFFICIENCY, PEAK, Metric, describe

# The figure that says whose memory a metric measures, or of which peak the MFU is a share.
KIND_NAMES = {PEAK: "memory_kind", "perf/mfu": "mfu_kind"}


class FigureRow(NamedTuple):
    """One metric of all runs."""

    metric: Metric
    values: list[float | None]  # one for each run; None if unknown
    kind_name: str = ""  # the figure with a value's split, memory or peak; empty without one
    ratio_name: str = ""  # the figure with the ratio to the baseline; empty without one
    is_of_model: bool = False  # whether the metric is of the trained model, which has a seed
    is_final_objective: bool = False


def figure_rows(comparison: Comparison) -> Iterator[FigureRow]:
    """Yield the metrics in the table's order: speed and memory, the objective, other metrics.

    Runs with different objectives share the rows of the objective; each has its own metric there.
    """
    all_figures = comparison.figures
    for name in (*FIGURES, EFFICIENCY):
        values = [figures[name] for figures in all_figures]
        yield FigureRow(describe(name), values, KIND_NAMES.get(name, ""), RATIOS.get(name, ""))
    yield from objective_rows(comparison)
    goals = [run.objective.metric for run in comparison.runs]
    for name in dict.fromkeys(chain(*(figures["final"] for figures in all_figures))):
        metric = describe(name)
        if name not in goals and metric.panel:
            values = [figures["final"].get(name) for figures in all_figures]
            final_metric = replace(metric, label=f"final {metric.label}")
            yield FigureRow(final_metric, values, "final_split", is_of_model=True)


def objective_rows(comparison: Comparison) -> Iterator[FigureRow]:
    """Yield the final and the best value of the objective."""
    all_figures = comparison.figures
    goals = [run.objective.metric for run in comparison.runs]
    goal = describe(goals[0])
    label = goal.label if len(set(goals)) == 1 else "objective"
    final = [figures["final"].get(name) for figures, name in zip(all_figures, goals, strict=True)]
    final_metric = replace(goal, label=f"final {label}")
    yield FigureRow(final_metric, final, "final_split", is_of_model=True, is_final_objective=True)
    best = [figures["best"] for figures in all_figures]
    best_metric = replace(goal, label=f"best {label}")
    yield FigureRow(best_metric, best, "best_split", is_of_model=True)


def heading_of(row: FigureRow, comparison: Comparison) -> str:
    """Return a metric's heading, with the split, memory or peak if all values share it."""
    kinds = set(kinds_of(row, comparison).values())
    return row.metric.heading if len(kinds) != 1 else f"{row.metric.heading}, {kinds.pop()}"


def kinds_of(row: FigureRow, comparison: Comparison) -> dict[int, str]:
    """Return the split, memory or peak of each known value, by the place of its run."""
    if not row.kind_name:
        return {}
    return {
        place: comparison.figures[place][row.kind_name]
        for place, value in enumerate(row.values)
        if value is not None
    }


def kind_suffix(row: FigureRow, comparison: Comparison, place: int) -> str:
    """Return a cell's suffix with the split, memory or peak; empty if the heading has it."""
    kinds = kinds_of(row, comparison)
    return f" ({kinds[place]})" if place in kinds and len(set(kinds.values())) > 1 else ""
