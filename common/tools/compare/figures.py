"""The figures of one run, such as its throughput, its peak memory and its final accuracy."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from common.metric_names import (
    GOODPUT,
    HOST_MEMORY,
    JOULES_PER_SAMPLE,
    MFU,
    OTHER_CPU,
    PEAK_ALLOCATED,
    STEP,
    THROUGHPUT,
    TOKEN_THROUGHPUT,
    TOTAL_SECONDS,
    TRAINING_SECONDS,
)
from common.objective import PREFIXES, Split
from common.tools.compare.readers.run_record import RunRecord
from common.tools.statistics.samples import proportion_error
from common.track.names import EFFICIENCY, PEAK, is_proportion, precision_name

FIGURES = (
    THROUGHPUT,
    TOKEN_THROUGHPUT,
    MFU,
    GOODPUT,
    PEAK,
    JOULES_PER_SAMPLE,
    TRAINING_SECONDS,
    TOTAL_SECONDS,
    OTHER_CPU,
)
MemoryKind = Literal["device", "host"]
MEMORY_METRICS: dict[MemoryKind, str] = {
    "device": PEAK_ALLOCATED,
    "host": HOST_MEMORY,
}


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run. A figure that is unknown is None."""

    status: str  # for an unfinished run, it includes how far the run came
    processes: int
    objective: str  # such as "accuracy:max"
    metrics: dict[str, float | None]  # the metrics in `FIGURES`, by name
    memory_kind: MemoryKind | None  # whose peak memory `metrics` has
    mfu_kind: str  # the peak for `perf/mfu` in words, such as "of the bf16 peak"
    final: dict[str, float]  # the metrics of the final evaluation, without their split
    final_split: Split  # the split of the final evaluation
    final_samples: float | None  # the number of samples in the final evaluation
    final_standard_error: float | None  # of the objective in `final`
    best: float | None  # the objective's best value in evaluations during training
    best_split: Split  # the split of evaluations during training
    best_standard_error: float | None  # of `best`
    reached_target: bool | None  # None without a target, or without an evaluation in training
    steps_to_target: float | None  # the update that first reached the target
    seconds_to_target: float | None  # the training time until that update
    # These three compare the run with the baseline; `with_ratios` computes them.
    throughput_ratio: float | None = None
    memory_ratio: float | None = None
    scaling_efficiency: float | None = None

    def to_json(self) -> dict[str, object]:
        """Return the figures by the names that `--json` prints."""
        return {
            "status": self.status,
            "processes": self.processes,
            "objective": self.objective,
            **self.metrics,
            "memory_kind": self.memory_kind,
            "mfu_kind": self.mfu_kind,
            "final": self.final,
            "final_split": self.final_split,
            "final_samples": self.final_samples,
            "final_standard_error": self.final_standard_error,
            "best": self.best,
            "best_split": self.best_split,
            "best_standard_error": self.best_standard_error,
            "reached_target": self.reached_target,
            "steps_to_target": self.steps_to_target,
            "seconds_to_target": self.seconds_to_target,
            "throughput_ratio": self.throughput_ratio,
            "memory_ratio": self.memory_ratio,
            EFFICIENCY: self.scaling_efficiency,
        }


def figures_of(run: RunRecord, target: float | None) -> RunFigures:
    """Return a run's figures, without its ratios to a baseline.

    Args:
        run: the run, finished or not.
        target: a value of the run's objective. None if there is no target, or if the target is a
            value of a different objective. A run with `--evaluate-only` reaches no target.
    """
    best_split, final_split = run.splits
    final = final_metrics(run)
    # A run without a summary has not ended, so its best value is the best of its rows so far.
    best = run.summary.get(
        run.objective.best_key, run.objective.best(run.values(run.objective_key))
    )
    memory_kind, peak = memory_kind_and_peak(run)
    metrics = {name: figure_of_run(run, name) for name in FIGURES}
    metrics[PEAK] = peak  # runs log no metric of this name
    if not run.is_trained:  # its model may have reached the target in another run
        target = None
    can_reach_target = target is not None and bool(run.values(run.objective_key))
    row_at_target = first_row_at_target(run, target)
    return RunFigures(
        status=status_text(run),
        processes=run.saved_config.environment.world_size,
        objective=str(run.objective),
        metrics=metrics,
        memory_kind=memory_kind,
        mfu_kind=mfu_kind(run),
        final=final,
        final_split=final_split,
        final_samples=evaluated_samples(run, final_split),
        final_standard_error=standard_error(
            run, run.objective.metric, final.get(run.objective.metric), final_split
        ),
        best=best,
        best_split=best_split,
        best_standard_error=standard_error(run, run.objective.metric, best, best_split),
        reached_target=bool(row_at_target) if can_reach_target else None,
        steps_to_target=row_at_target.get(STEP),
        seconds_to_target=row_at_target.get(TRAINING_SECONDS),
    )


def status_text(run: RunRecord) -> str:
    """Return a run's status, and how far an unfinished run came."""
    if run.status == "finished":
        return run.status
    return f"{run.status} at step {run.global_step:,} of {run.saved_config.plan.total_steps:,}"


def mfu_kind(run: RunRecord) -> str:
    """Return a phrase on the rate that a run's MFU is a share of, such as "of the bf16 peak"."""
    measured = "measured " if run.saved_config.peak.source == "measured" else ""
    precision = precision_name(run.saved_config.environment.mixed_precision)
    return f"of the {measured}{precision} peak"


def standard_error(run: RunRecord, metric: str, value: float | None, split: Split) -> float | None:
    """Return the standard error of a value of a run's metric, from its number of samples.

    A split is a random choice of samples, and the error says how much the value would vary with
    another choice. It is known for proportions such as an accuracy, and None for other metrics.

    Args:
        metric: the metric's name without its split.
        value: a value of the metric; None if unknown.
        split: the split that the value was measured on, "validation" or "test".
    """
    count = evaluated_samples(run, split)
    if value is None or count is None or not is_proportion(metric):
        return None
    return proportion_error(value, count)


def evaluated_samples(run: RunRecord, split: Split) -> float | None:
    """Return the number of samples of a run's last evaluation on a split; None if unknown."""
    counts = logged_and_final_values(run, f"{PREFIXES[split]}/count")
    return counts[-1] if counts else None


def memory_kind_and_peak(run: RunRecord) -> tuple[MemoryKind | None, float | None]:
    """Return whose memory was measured, and its peak in MiB; both are None if neither was logged.

    The device's memory comes first. The host's memory stands in where the run logged no other.
    """
    for memory_kind, name in MEMORY_METRICS.items():
        values = logged_and_final_values(run, name)
        if values:
            return memory_kind, max(values)
    return None, None


def logged_and_final_values(run: RunRecord, name: str) -> list[float]:
    """Return all values of a metric that a run logged, in order; the summary's value is last."""
    return [row[name] for row in (*run.rows, run.summary) if name in row]


def final_metrics(run: RunRecord) -> dict[str, float]:
    """Return the metrics of the final evaluation, without the prefix of their split."""
    # The pattern leaves out best values, which belong to earlier evaluations, and names with a full
    # stop, which W&B adds.
    _, final_split = run.splits
    pattern = re.compile(rf"{PREFIXES[final_split]}/(?!best_)([^.]+)")
    matches = {name: pattern.fullmatch(name) for name in run.summary}
    return {match[1]: run.summary[name] for name, match in matches.items() if match}


def first_row_at_target(run: RunRecord, target: float | None) -> Mapping[str, float]:
    """Return the first row in which the objective reached a target; empty if no row did."""
    if target is None:
        return {}
    for row in run.rows:
        if run.objective_key in row and run.objective.reaches(row[run.objective_key], target):
            return row
    return {}


def figure_of_run(run: RunRecord, metric: str) -> float | None:
    """Return one figure for a whole run, such as its throughput; None if it is unknown.

    The summary has the figure, but only after the end of the run. Until then the logged values give
    an estimate: the median of the log intervals for metrics of ``perf/``, such as speed, whose
    values go up and down, and the largest value for times, which only grow.
    """
    values = run.values(metric)
    estimate = None
    if values:
        estimate = median(values) if metric.startswith("perf/") else max(values)
    return run.summary.get(metric, estimate)
