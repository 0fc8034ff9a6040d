"""The rows of figures that tables of runs and of groups have."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from common.metric_names import MFU, THROUGHPUT
from common.tools.compare.comparison import Comparison
from common.tools.compare.figures import FIGURES, RunFigures
from common.track.names import EFFICIENCY, PEAK, Metric, metric_named


class FigureRow(NamedTuple):
    """One metric of all runs. Each list has one entry for each run, or it is empty."""

    metric: Metric
    values: list[float | None]  # None if unknown
    # The split, memory or peak rate that each value belongs to; empty for other metrics.
    qualifiers: Sequence[str | None] = ()
    ratios: Sequence[float | None] = ()  # values over the baseline's; empty for other metrics
    # Whether the metric is of the trained model, so that runs with equal seeds repeat its value.
    is_of_model: bool = False
    is_final_objective: bool = False

    @property
    def heading(self) -> str:
        """The metric's heading, with the split, memory or peak rate if all values share it."""
        qualifiers = set(self.known_qualifiers.values())
        if len(qualifiers) != 1:
            return self.metric.heading
        return f"{self.metric.heading}, {qualifiers.pop()}"

    @property
    def known_qualifiers(self) -> dict[int, str]:
        """The split, memory or peak rate of each known value, by the index of its run."""
        return {
            index: qualifier
            for index, qualifier in enumerate(self.qualifiers)
            if qualifier is not None and self.values[index] is not None
        }

    def suffix(self, index: int) -> str:
        """Return the text behind a run's value: its qualifier, or nothing if the heading has it."""
        qualifiers = self.known_qualifiers
        if index not in qualifiers or len(set(qualifiers.values())) == 1:
            return ""
        return f" ({qualifiers[index]})"


def figure_rows(comparison: Comparison) -> Iterator[FigureRow]:
    """Yield the metrics in the table's order: speed and memory, the objective, other metrics.

    Runs with different objectives share the rows of the objective; each has its own metric there.
    """
    all_figures = comparison.figures
    for name in FIGURES:
        values = [figures.metrics[name] for figures in all_figures]
        qualifiers = qualifiers_of(name, all_figures)
        yield FigureRow(metric_named(name), values, qualifiers, ratios_of(name, all_figures))
    efficiencies = [figures.scaling_efficiency for figures in all_figures]
    yield FigureRow(metric_named(EFFICIENCY), efficiencies)
    yield from objective_rows(comparison)
    objective_metrics = [run.objective.metric for run in comparison.runs]
    final_splits = [figures.final_split for figures in all_figures]
    for name in dict.fromkeys(chain(*(figures.final for figures in all_figures))):
        metric = metric_named(name)
        if name not in objective_metrics and metric.panel:
            values = [figures.final.get(name) for figures in all_figures]
            final_metric = replace(metric, label=f"final {metric.label}")
            yield FigureRow(final_metric, values, final_splits, is_of_model=True)


def qualifiers_of(name: str, all_figures: Sequence[RunFigures]) -> list[str | None]:
    """Return words that qualify the value of a metric in each run; empty for most metrics.

    For the peak memory, they say which memory it is: "device" or "host". For the MFU, they name the
    peak rate that it is a share of.
    """
    if name == PEAK:
        return [figures.memory_kind for figures in all_figures]
    if name == MFU:
        return [figures.mfu_kind for figures in all_figures]
    return []


def ratios_of(name: str, all_figures: Sequence[RunFigures]) -> list[float | None]:
    """Return the ratios of a metric to the baseline; empty for a metric without ratios."""
    if name == THROUGHPUT:
        return [figures.throughput_ratio for figures in all_figures]
    if name == PEAK:
        return [figures.memory_ratio for figures in all_figures]
    return []


def objective_rows(comparison: Comparison) -> Iterator[FigureRow]:
    """Yield the final and the best value of the objective."""
    all_figures = comparison.figures
    names = [run.objective.metric for run in comparison.runs]
    metric = metric_named(names[0])
    label = metric.label if len(set(names)) == 1 else "objective"
    yield FigureRow(
        metric=replace(metric, label=f"final {label}"),
        values=[figures.final.get(name) for figures, name in zip(all_figures, names, strict=True)],
        qualifiers=[figures.final_split for figures in all_figures],
        is_of_model=True,
        is_final_objective=True,
    )
    yield FigureRow(
        metric=replace(metric, label=f"best {label}"),
        values=[figures.best for figures in all_figures],
        qualifiers=[figures.best_split for figures in all_figures],
        is_of_model=True,
    )
