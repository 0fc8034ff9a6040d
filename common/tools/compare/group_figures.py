"""The figures by which a group of runs is judged: its objective and its throughput."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from common.metric_names import THROUGHPUT
from common.tools.compare.comparison import Comparison
from common.tools.compare.groups import RunGroup
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.repetitions import (
    Values,
    finished_indices,
    sample_of_runs,
    values_of_seeds,
)
from common.tools.statistics.samples import (
    MIN_RUNS,
    Sample,
    series_sample,
)

MIN_LOG_LINES = 3  # log lines that show how much the throughput of a single run varies


@dataclass(frozen=True)
class GroupFigures:
    """The figures by which a group is judged."""

    group: RunGroup
    first_run: RunRecord  # the first finished run; the first run if none is finished
    run_count: int  # number of finished runs
    values_of_seeds: Mapping[str, float]  # the objective, by seed
    standard_error: float | None  # that of the first run's objective, from its number of samples
    log_throughput: Sample  # logarithms of the throughput, one for each run
    log_throughput_of_lines: Sample  # the same at the log lines of the first finished run

    @property
    def objective(self) -> Sample:
        """The mean and spread of the objective over the seeds."""
        return Sample.of([*self.values_of_seeds.values()])

    @property
    def is_repeated(self) -> bool:
        """Whether there are enough runs to show how much they vary by chance."""
        return self.run_count >= MIN_RUNS


def figures_of_groups(comparison: Comparison, *, in_training: bool) -> list[GroupFigures]:
    """Return the figures by which each group of a comparison is judged, in the groups' order.

    Args:
        in_training: whether to judge by the best value in training's own evaluations. Otherwise the
            final evaluation counts.
    """
    objectives = objective_values(comparison, in_training=in_training)
    standard_errors = [
        figures.best_standard_error if in_training else figures.final_standard_error
        for figures in comparison.figures
    ]
    return [
        figures_of_group(comparison, group, objectives, standard_errors)
        for group in comparison.groups
    ]


def figures_of_group(
    comparison: Comparison,
    group: RunGroup,
    objectives: Values,
    standard_errors: Values,
) -> GroupFigures:
    """Return the figures by which a group is judged.

    Args:
        objectives: the objective's values of all runs of the comparison.
        standard_errors: the standard errors of these values.
    """
    log_throughputs = [logarithm(figures.metrics[THROUGHPUT]) for figures in comparison.figures]
    indices_of_finished = finished_indices(comparison, group)
    # The first finished run, whose standard error belongs to one of the values of the objective.
    first_index = (indices_of_finished or group.run_indices)[0]
    first_run = comparison.runs[first_index]
    log_throughput_of_lines = Sample.of([])
    if indices_of_finished:
        log_throughput_of_lines = sample_of_log_lines(first_run)
    return GroupFigures(
        group=group,
        first_run=first_run,
        run_count=len(indices_of_finished),
        values_of_seeds=values_of_seeds(comparison, group, objectives),
        standard_error=standard_errors[first_index],
        log_throughput=sample_of_runs(comparison, group, log_throughputs),
        log_throughput_of_lines=log_throughput_of_lines,
    )


def objective_values(comparison: Comparison, *, in_training: bool) -> Values:
    """Return the objective of each run, or None where it is unknown.

    Args:
        in_training: take the best value of the evaluations during training. Otherwise, take the
            value of the final evaluation.
    """
    if in_training:
        return [figures.best for figures in comparison.figures]
    return [
        figures.final.get(run.objective.metric)
        for run, figures in zip(comparison.runs, comparison.figures, strict=True)
    ]


def logarithm(rate: float | None) -> float | None:
    """Return the logarithm of a rate; None if the rate is unknown, infinite or not positive."""
    if rate is None or not 0 < rate < math.inf:
        return None
    return math.log(rate)


def sample_of_log_lines(run: RunRecord) -> Sample:
    """Return the mean and spread of the logarithms of the throughput at a run's log lines.

    Lines that follow each other are alike, so `series_sample` counts them as fewer independent
    values. With fewer than `MIN_LOG_LINES` known values, the sample is empty.
    """
    logarithms = [logarithm(rate) for rate in run.values(THROUGHPUT)]
    known = [value for value in logarithms if value is not None]
    if len(known) < MIN_LOG_LINES:
        return Sample.of([])
    return series_sample(known)
