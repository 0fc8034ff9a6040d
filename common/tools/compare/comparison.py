"""Set runs side by side: figures, ratios to the first run, what differs, and groups of seeds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, TypedDict

from common.objective import PREFIXES, Objective, Split
from common.tools.compare.facts import facts_of, unfair_labels
from common.tools.compare.groups import RunGroup, group_runs
from common.tools.compare.readers import RunRecord
from common.tools.statistics.samples import proportion_error
from common.track.names import (
    EFFICIENCY,
    OTHER_CPU,
    PEAK,
    STEP,
    THROUGHPUT,
    is_proportion,
    precision_name,
)

FIGURES = (
    *(THROUGHPUT, "perf/tokens_per_second", "perf/mfu", "perf/goodput", PEAK),
    *("perf/joules_per_sample", "time/train_seconds", "time/total_seconds", OTHER_CPU),
)
# The name of a figure's ratio to the baseline, by the name of the figure.
RATIOS = {THROUGHPUT: "throughput_ratio", PEAK: "memory_ratio"}
MEMORY = {"device": "memory/peak_allocated_mib", "host": "memory/host_rss_mib"}


# A run's figures by the names that `--json` prints: numbers, texts, or None; see `figures_of`.
RunFigures = dict[str, Any]


class UnfairPair(TypedDict):
    """A difference from the baseline that makes a run's figures incomparable with it."""

    run: str
    what: str  # the label of the fact that differs
    baseline_value: object
    value: object


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; the first is the baseline."""

    runs: list[RunRecord]
    figures: list[RunFigures]  # by run
    differences: dict[str, list[object]]  # each run's value of the facts that differ, by label
    unfair: list[UnfairPair]
    target: float | None  # a value of the baseline's objective; None: there is no target
    target_is_given: bool
    groups: list[RunGroup]  # runs that differ in the seed alone; the first has the baseline


def compare(
    runs: Sequence[RunRecord], target: float | None = None, labels: Sequence[str] | None = None
) -> Comparison:
    """Compare runs with the first of them.

    Args:
        runs: at least one, the baseline first.
        target: a value of the baseline's objective. The default is the worst of the best values of
            all runs with this objective, so that each of them reached it.
        labels: the group of each run; see `group_runs` for the default.
    """
    objective = runs[0].objective
    target_is_given = target is not None
    if target is None:
        target = worst_of_best(runs, objective)
    # The target says nothing about a run with another objective.
    figures = [figures_of(run, target if run.objective == objective else None) for run in runs]
    for own_figures in figures:
        add_ratios(own_figures, figures[0])
    saved_configs = [run.saved_config for run in runs]
    facts = [facts_of(saved_config, saved_configs) for saved_config in saved_configs]
    settings = [{label: fact.value for label, fact in own_facts.items()} for own_facts in facts]
    groups = group_runs(runs, settings, labels)
    differences = differences_of(settings)
    unfair = unfair_pairs(runs, differences, unfair_labels(facts))
    return Comparison(list(runs), figures, differences, unfair, target, target_is_given, groups)


def differences_of(settings: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return each run's value of the facts in which the runs differ, by label.

    Args:
        settings: each run's facts. A run that lacks a fact has the value None.
    """
    differences = {}
    for label in dict.fromkeys(chain(*settings)):
        values = [own_settings.get(label) for own_settings in settings]
        if any(value != values[0] for value in values):
            differences[label] = values
    return differences


def worst_of_best(runs: Sequence[RunRecord], objective: Objective) -> float | None:
    """Return the worst of the runs' best values, a target that each of these runs has reached.

    Runs with another objective do not count. The result is None if fewer than two runs remain,
    because there is nothing to compare then, or if none of the runs has evaluated.
    """
    runs_with_objective = [run for run in runs if run.objective == objective]
    if len(runs_with_objective) < 2:
        return None
    best_values = [objective.best(run.values(run.goal)) for run in runs_with_objective]
    known = [value for value in best_values if value is not None]
    worst = min if objective.mode == "max" else max
    return worst(known, default=None)


def add_ratios(figures: RunFigures, baseline: RunFigures) -> None:
    """Add to a run's figures its ratios to the baseline and its scaling efficiency.

    The efficiency is the ratio of throughputs over the ratio of processes. It exists only for
    different numbers of processes. A figure that can't be computed is None.
    """
    for name, ratio_name in RATIOS.items():
        value = figures[name]
        baseline_value = baseline[name]
        is_known = value is not None and baseline_value  # nothing can be divided by 0
        figures[ratio_name] = value / baseline_value if is_known else None
    # A device's memory and the host's can't be compared.
    if figures["memory_kind"] != baseline["memory_kind"]:
        figures["memory_ratio"] = None
    throughput_ratio = figures["throughput_ratio"]
    processes = figures["processes"]
    baseline_processes = baseline["processes"]
    processes_differ = processes and baseline_processes and processes != baseline_processes
    figures[EFFICIENCY] = None
    if processes_differ and throughput_ratio is not None:
        figures[EFFICIENCY] = throughput_ratio * baseline_processes / processes


def unfair_pairs(
    runs: Sequence[RunRecord], differences: Mapping[str, Sequence[object]], labels: set[str]
) -> list[UnfairPair]:
    """Return the differences from the baseline that make a run's figures incomparable.

    Args:
        differences: each run's value of the facts in which the runs differ, by the fact's label.
        labels: the labels of the facts that make figures incomparable.
    """
    pairs: list[UnfairPair] = []
    for label, values in differences.items():
        if label not in labels:
            continue
        baseline_value = values[0]
        for run, value in zip(runs, values, strict=True):
            if value != baseline_value:
                pair = UnfairPair(
                    run=run.name, what=label, baseline_value=baseline_value, value=value
                )
                pairs.append(pair)
    return pairs


def figures_of(run: RunRecord, target: float | None) -> RunFigures:
    """Return a run's figures by the names that `--json` prints; None stands for unknown.

    They are the metrics in `FIGURES`, plain ones such as ``status``, and these:

    - ``memory_kind``: whose memory the peak is of, the device's if known, otherwise the host's
    - ``mfu_kind``: the peak that ``perf/mfu`` is a share of, such as "of the bf16 peak"
    - ``final``: the metrics of the final evaluation, without their split
    - ``best``: the best value of the objective in training's own evaluations
    - ``final_samples``: how many samples the final evaluation had
    - ``final_standard_error`` and ``best_standard_error``: the standard errors of these values of
      the objective, from the number of samples, if the values are proportions
    - ``steps_to_target`` and ``seconds_to_target``: where `target` was first reached

    Args:
        run: the run, finished or not.
        target: a value of the run's objective. None if there is no target, or if the target is a
            value of another objective.
    """
    figures: RunFigures = {
        "status": status_text(run),
        "processes": run.saved_config.environment.world_size,
        "objective": str(run.objective),
    }
    figures |= {name: figure_of_run(run, name) for name in FIGURES}
    # Runs log no metric named PEAK. Its value is the device's peak if known, else the host's.
    peaks = peak_memory(run)
    figures["memory_kind"] = next(iter(peaks), None)
    figures[PEAK] = next(iter(peaks.values()), None)
    figures["mfu_kind"] = mfu_kind(run)
    # A run without a summary has not ended. Its best value is the best so far.
    best = run.summary.get(run.objective.best_key, run.objective.best(run.values(run.goal)))
    final = final_metrics(run)
    best_split, final_split = run.splits
    figures |= {
        "final": final,
        "final_split": final_split,
        "final_samples": evaluated_samples(run, final_split),
        "final_standard_error": standard_error(run, final.get(run.objective.metric), final_split),
        "best": best,
        "best_split": best_split,
        "best_standard_error": standard_error(run, best, best_split),
    }
    return figures | figures_of_target(run, target)


def status_text(run: RunRecord) -> str:
    """Return a run's status, and how far an unfinished run came."""
    if run.status == "finished":
        return run.status
    return f"{run.status} at step {run.last_step:,} of {run.saved_config.plan.total_steps}"


def mfu_kind(run: RunRecord) -> str:
    """Return the peak rate that a run's MFU is a share of: it depends on the precision."""
    measured = "measured " if run.saved_config.peak.source == "measured" else ""
    precision = precision_name(run.saved_config.environment.mixed_precision)
    return f"of the {measured}{precision} peak"


def standard_error(run: RunRecord, value: float | None, split: Split) -> float | None:
    """Return the standard error of a value of the run's objective, from its number of samples.

    The error comes from the chance in which samples a split happens to have. It is known for
    proportions such as an accuracy, and None for other metrics.

    Args:
        value: a value of the objective; None if unknown.
        split: the split that the value was measured on, "validation" or "test".
    """
    count = evaluated_samples(run, split)
    if value is None or count is None or not is_proportion(run.objective.metric):
        return None
    return proportion_error(value, count)


def evaluated_samples(run: RunRecord, split: Split) -> float | None:
    """Return the number of samples of a run's last evaluation on a split; None if unknown."""
    name = f"{PREFIXES[split]}/count"
    counts = [row[name] for row in (*run.rows, run.summary) if name in row]
    return counts[-1] if counts else None


def peak_memory(run: RunRecord) -> dict[str, float]:
    """Return the peak memory in MiB by the key of `MEMORY`: the device first, then the host.

    A kind of memory that the run did not log is left out.
    """
    peaks = {}
    for memory_kind, name in MEMORY.items():
        values = [row[name] for row in (*run.rows, run.summary) if name in row]
        if values:
            peaks[memory_kind] = max(values)
    return peaks


def final_metrics(run: RunRecord) -> dict[str, float]:
    """Return the metrics of the final evaluation, without the prefix of their split."""
    # The pattern leaves out best values, which belong to earlier evaluations, and names with a full
    # stop, which W&B adds.
    pattern = re.compile(rf"{PREFIXES[run.splits[1]]}/(?!best_)([^.]+)")
    matches = {name: pattern.fullmatch(name) for name in run.summary}
    return {match[1]: run.summary[name] for name, match in matches.items() if match}


def figures_of_target(run: RunRecord, target: float | None) -> RunFigures:
    """Return whether a run reached a target of its objective, and the place of the first time.

    Without a target, or before the first evaluation, ``reached_target`` is None.
    """
    can_tell = target is not None and bool(run.values(run.goal))
    first_row: Mapping[str, float] = {}  # stays empty if no evaluation reached the target
    for row in run.rows:
        if target is not None and run.goal in row and run.objective.reaches(row[run.goal], target):
            first_row = row
            break
    return {
        "reached_target": bool(first_row) if can_tell else None,
        "steps_to_target": first_row.get(STEP),
        "seconds_to_target": first_row.get("time/train_seconds"),
    }


def figure_of_run(run: RunRecord, metric: str) -> float | None:
    """Return one figure for a whole run, such as its throughput; None if it is unknown.

    The summary has the figure, but only after the end of the run. Until then the logged values give
    an estimate: the median of the log intervals for speed and energy, whose values go up and down,
    and the largest value for times, which only grow.
    """
    values = run.values(metric)
    estimate = None
    if values:
        estimate = median(values) if metric.startswith("perf/") else max(values)
    return run.summary.get(metric, estimate)
