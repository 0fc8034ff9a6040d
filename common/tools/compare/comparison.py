"""Set runs side by side: figures, ratios to the first run, what differs, and groups of seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from common.metric_names import THROUGHPUT
from common.objective import Objective
from common.tools.compare.figures import RunFigures, figures_of
from common.tools.compare.groups import RunGroup, group_runs
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.settings import (
    differing_settings,
    settings_of,
    settings_that_must_agree,
)
from common.track.names import PEAK


@dataclass(frozen=True)
class UnfairDifference:
    """A difference that makes a run's figures incomparable with those of the baseline."""

    run: str  # the run's name
    label: str  # the label of the setting that differs
    baseline_value: object
    value: object

    def to_json(self) -> dict[str, object]:
        """Return the fields under the names that `--json` prints."""
        return {
            "run": self.run,
            "what": self.label,
            "baseline_value": self.baseline_value,
            "value": self.value,
        }


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; the first is the baseline."""

    runs: list[RunRecord]
    figures: list[RunFigures]  # one for each run
    differences: dict[str, list[object]]  # each run's value of the settings that differ, by label
    unfair_differences: list[UnfairDifference]
    target: float | None  # a value of the baseline's objective; None: there is no target
    target_is_given: bool  # whether the user chose the target
    groups: list[RunGroup]  # runs that differ in the seed alone; the first has the baseline


def compare(
    runs: Sequence[RunRecord], target: float | None = None, labels: Sequence[str] | None = None
) -> Comparison:
    """Compare runs with the first of them.

    Args:
        runs: at least one, the baseline first.
        target: a value of the baseline's objective. The default is the worst of the best values of
            all runs with this objective, so that each of them reached it.
        labels: the name of each run's group; see `group_runs` for the default.
    """
    objective = runs[0].objective
    target_is_given = target is not None
    if target is None:
        target = worst_of_best(runs, objective)
    # The target says nothing about a run with a different objective.
    figures = [figures_of(run, target if run.objective == objective else None) for run in runs]
    baseline_figures = figures[0]
    figures = [with_ratios(own_figures, baseline_figures) for own_figures in figures]
    saved_configs = [run.saved_config for run in runs]
    settings_of_runs = [settings_of(saved_config, saved_configs) for saved_config in saved_configs]
    differences = differing_settings(settings_of_runs)
    labels_that_must_agree = set(chain(*map(settings_that_must_agree, saved_configs)))
    return Comparison(
        runs=list(runs),
        figures=figures,
        differences=differences,
        unfair_differences=unfair_differences(runs, differences, labels_that_must_agree),
        target=target,
        target_is_given=target_is_given,
        groups=group_runs(runs, settings_of_runs, labels),
    )


def worst_of_best(runs: Sequence[RunRecord], objective: Objective) -> float | None:
    """Return the worst of the runs' best values, which is a target that each run has reached.

    Runs with a different objective do not count, and neither do runs that only evaluate a model, or
    that have not evaluated yet. The result is None if fewer than two runs train by the objective,
    because there is nothing to compare then, or if none of them has evaluated.
    """
    runs_with_objective = [run for run in runs if run.objective == objective and run.is_trained]
    if len(runs_with_objective) < 2:
        return None
    best_values = [objective.best(run.values(run.objective_key)) for run in runs_with_objective]
    known = [value for value in best_values if value is not None]
    worst = min if objective.mode == "max" else max
    return worst(known, default=None)


def with_ratios(figures: RunFigures, baseline: RunFigures) -> RunFigures:
    """Return a run's figures with its ratios to the baseline and its scaling efficiency.

    The efficiency is the ratio of throughputs over the ratio of processes. It exists only for
    different numbers of processes.
    """
    throughput_ratio = ratio_to_baseline(figures, baseline, THROUGHPUT)
    memory_ratio = None
    # A device's memory and the host's can't be compared, so they have no ratio.
    if figures.memory_kind == baseline.memory_kind:
        memory_ratio = ratio_to_baseline(figures, baseline, PEAK)
    scaling_efficiency = None
    if throughput_ratio is not None and figures.processes != baseline.processes:
        scaling_efficiency = throughput_ratio * baseline.processes / figures.processes
    return replace(
        figures,
        throughput_ratio=throughput_ratio,
        memory_ratio=memory_ratio,
        scaling_efficiency=scaling_efficiency,
    )


def ratio_to_baseline(figures: RunFigures, baseline: RunFigures, name: str) -> float | None:
    """Return the ratio of a metric to the baseline's value; None if it can't be computed."""
    value = figures.metrics[name]
    baseline_value = baseline.metrics[name]
    if value is None or not baseline_value:  # nothing can be divided by 0
        return None
    return value / baseline_value


def unfair_differences(
    runs: Sequence[RunRecord],
    differences: Mapping[str, Sequence[object]],
    labels_that_must_agree: set[str],
) -> list[UnfairDifference]:
    """Return the differences from the baseline that make a run's figures incomparable.

    Args:
        differences: each run's value of the settings in which the runs differ, by label.
        labels_that_must_agree: the labels of the settings that make figures incomparable if they
            differ.
    """
    unfair: list[UnfairDifference] = []
    for label, values in differences.items():
        if label not in labels_that_must_agree:
            continue
        baseline_value = values[0]
        for run, value in zip(runs, values, strict=True):
            if value != baseline_value:
                unfair.append(UnfairDifference(run.name, label, baseline_value, value))
    return unfair
