"""The rows of a comparison's tables: one metric each, with a value for each run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from common.metric_names import MFU, THROUGHPUT
from common.objective import PREFIXES, Objective
from common.tools.compare.comparison import Comparison
from common.tools.compare.figures import FIGURES, RunFigures, standard_error
from common.tools.compare.readers.run_record import RunRecord
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
    # The standard errors of the values, from the numbers of samples. Only the final value of an
    # objective's metric has them.
    standard_errors: Sequence[float | None] = ()

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
    """Yield the metrics in the table's order: speed and memory, the objectives, other metrics."""
    all_figures = comparison.figures
    for name in FIGURES:
        values = [figures.metrics[name] for figures in all_figures]
        qualifiers = qualifiers_of(name, all_figures)
        yield FigureRow(metric_named(name), values, qualifiers, ratios_of(name, all_figures))
    efficiencies = [figures.scaling_efficiency for figures in all_figures]
    yield FigureRow(metric_named(EFFICIENCY), efficiencies)
    objectives = objectives_by_metric(comparison)
    for objective in objectives.values():
        yield from objective_rows(comparison, objective)
    final_splits = [figures.final_split for figures in all_figures]
    for name in dict.fromkeys(chain(*(figures.final for figures in all_figures))):
        metric = metric_named(name)
        if name not in objectives and metric.panel:
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


def objectives_by_metric(comparison: Comparison) -> dict[str, Objective]:
    """Return the objective of each metric that is the objective of a run, by the metric's name.

    If runs disagree on whether more or less of a metric is better, the first of them decides.
    """
    objectives: dict[str, Objective] = {}
    for run in comparison.runs:
        objectives.setdefault(run.objective.metric, run.objective)
    return objectives


def objective_rows(comparison: Comparison, objective: Objective) -> Iterator[FigureRow]:
    """Yield the final and the best value of an objective's metric in all runs.

    A run with another objective has such values, too, if it logs the metric.
    """
    all_figures = comparison.figures
    metric = metric_named(objective.metric)
    final_values = [figures.final.get(objective.metric) for figures in all_figures]
    yield FigureRow(
        metric=replace(metric, label=f"final {metric.label}"),
        values=final_values,
        qualifiers=[figures.final_split for figures in all_figures],
        is_of_model=True,
        standard_errors=[
            standard_error(run, objective.metric, value, figures.final_split)
            for run, figures, value in zip(comparison.runs, all_figures, final_values, strict=True)
        ],
    )
    yield FigureRow(
        metric=replace(metric, label=f"best {metric.label}"),
        values=[
            best_value(run, figures, objective)
            for run, figures in zip(comparison.runs, all_figures, strict=True)
        ],
        qualifiers=[figures.best_split for figures in all_figures],
        is_of_model=True,
    )


def best_value(run: RunRecord, figures: RunFigures, objective: Objective) -> float | None:
    """Return the best value of an objective's metric in a run's evaluations during training.

    The run may have another objective. The result is None if it did not log the metric.
    """
    if run.objective.metric == objective.metric:
        return figures.best
    return objective.best(run.values(f"{PREFIXES[figures.best_split]}/{objective.metric}"))
