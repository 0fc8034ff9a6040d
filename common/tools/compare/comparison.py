"""Set runs side by side: their figures, how they stand to the first one's, and what differs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import Any

from common.config import TrainingConfig
from common.flags import role_of, spelled
from common.objective import PREFIXES
from common.tools.compare.readers import RunRecord
from common.track.names import EFFICIENCY, PEAK, STEP, precision_name

FIGURES = (
    *("perf/samples_per_second", "perf/tokens_per_second", "perf/mfu", "perf/goodput", PEAK),
    *("perf/joules_per_sample", "time/train_seconds", "time/total_seconds"),
)
RATIOS = {"perf/samples_per_second": "throughput_ratio", PEAK: "memory_ratio"}
# Where `config.json` has what runs must agree in for their figures to compare,
FAIR = {
    "recipe": "recipe",
    "objective": "objective",
    "data set": "data.name",
    "samples of": "data.sizes",
    "data's fingerprint": "data.fingerprint",
    "model": "architecture.name",
    "parameters": "architecture.parameters",
    "device": "environment.device",
    "threads per process": "environment.threads_per_process",
    "effective batch": "environment.effective_batch_size",
    "python": "environment.python",
    "version of": "environment.versions",
}
# and what is often compared on purpose, as flags are.
ON_PURPOSE = {
    "processes": "environment.world_size",
    "precision": "environment.mixed_precision",
    "updates planned": "plan.total_steps",
    "commit": "environment.git_commit",
}
MEMORY = {"device": "memory/peak_allocated_mib", "host": "memory/host_rss_mib"}


@dataclass(frozen=True)
class Comparison:
    runs: list[RunRecord]
    figures: list[dict[str, Any]]  # of each run; see `figures_of`
    differences: dict[str, list[Any]]  # what is not the same everywhere, and each run's value
    unfair: list[dict[str, Any]]  # run, what, baseline_value, value: figures don't compare
    target: float | None  # of the baseline's objective
    target_is_given: bool


def compare(runs: Sequence[RunRecord], target: float | None = None) -> Comparison:
    """Compare runs with the first of them; the target is the worst of their best, if not given."""
    given, goal = target is not None, runs[0].objective
    alike = [run for run in runs if run.objective == goal]
    if not given and len(alike) > 1:
        best = [goal.best(run.values(run.goal)) for run in alike]
        worst = min if goal.mode == "max" else max
        target = worst((value for value in best if value is not None), default=None)
    figures = [figures_of(run, target if run.objective == goal else None) for run in runs]
    for own in figures:
        for name, ratio in RATIOS.items():
            value, base = own[name], figures[0][name]
            own[ratio] = value / base if value is not None and base else None
        if own["memory_kind"] != figures[0]["memory_kind"]:
            own["memory_ratio"] = None
        ratio, more, base = own["throughput_ratio"], own["processes"], figures[0]["processes"]
        is_known = ratio is not None and more and base and more != base
        own[EFFICIENCY] = ratio * base / more if is_known else None
    facts = [facts_of(run, runs) for run in runs]
    columns = {name: [own.get(name) for own in facts] for name in dict.fromkeys(chain(*facts))}
    differences = {name: c for name, c in columns.items() if any(v != c[0] for v in c)}
    unfair = [
        {"run": run.name, "what": what, "baseline_value": values[0], "value": value}
        for what, values in differences.items()
        for run, value in zip(runs, values, strict=True)
        if value != values[0] and what.startswith(tuple(FAIR))
    ]
    return Comparison(list(runs), figures, differences, unfair, target, given)


def facts_of(run: RunRecord, runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what a run's figures may depend on, by label; of a group, by label and part.

    A flag is left out if the recipe of any of the `runs` says that it is not to be compared.
    """
    facts: dict[str, Any] = {}
    for label, path in (FAIR | ON_PURPOSE).items():
        fact = attrgetter(path)(run.saved_config)
        parts = fact.items() if isinstance(fact, Mapping) else ()
        facts |= {f"{label} {name}": part for name, part in parts} or {label: fact}
    changes = run.saved_config.source.changes
    if changes:
        steps = ", ".join(str(change.global_step) for change in changes)
        facts["recipe changed"] = f"at update {steps}"
    environment = run.saved_config.environment
    facts["precision"] = precision_name(environment.mixed_precision)  # the one that `auto` chose
    if environment.device_type != "cpu":
        facts.pop("threads per process", None)
    for name, value in run.flags.items():
        if name != "mixed_precision" and all(is_compared(name, other) for other in runs):
            facts[spelled(name)] = value
    return facts


def is_compared(flag: str, run: RunRecord) -> bool:
    """Whether a run's recipe has a flag compared; `config.json` says it where that is unusual."""
    usually = role_of(TrainingConfig, flag).compared
    return run.saved_config.compared.get(flag, usually)


def figures_of(run: RunRecord, target: float | None) -> dict[str, Any]:
    """Return a run's figures, as `--json` has them; None stands for what isn't known.

    Those of `FIGURES`; peak memory is the device's or (``memory_kind``) the host's; ``final`` has
    the metrics of the final evaluation; ``*_to_target`` is where `target` was first reached.
    """
    summary, objective, goal = run.summary, run.objective, run.goal
    where = f" at step {run.last_step:,} of {run.saved_config.plan.total_steps}"
    logged = [*run.rows, summary]
    peaks = {
        kind: max(values)
        for kind, name in MEMORY.items()
        if (values := [row[name] for row in logged if name in row])
    }
    kind = next(iter(peaks), None)
    # Neither the best value, nor names with a full stop, which W&B makes.
    finals = re.compile(rf"{PREFIXES[run.splits[1]]}/(?!best_)([^.]+)")
    reached: Mapping[str, float] = {}
    if target is not None:
        rows = (row for row in run.rows if goal in row and objective.reaches(row[goal], target))
        reached = next(rows, {})
    return {
        "status": run.status + ("" if run.status == "finished" else where),
        "processes": run.saved_config.environment.world_size,
        "objective": str(objective),
        **{name: whole(run, name) for name in FIGURES},
        PEAK: peaks[kind] if kind else None,
        "memory_kind": kind,
        "final": {found[1]: v for name, v in summary.items() if (found := finals.fullmatch(name))},
        "final_split": run.splits[1],
        "best": summary.get(objective.best_key, objective.best(run.values(goal))),
        "best_split": run.splits[0],
        "reached_target": None if target is None or not run.values(goal) else bool(reached),
        "steps_to_target": reached.get(STEP),
        "seconds_to_target": reached.get("time/train_seconds"),
    }


def whole(run: RunRecord, metric: str) -> float | None:
    """Return a figure of the whole run; before its end, the median of its intervals so far."""
    values = run.values(metric)
    of_intervals = median if metric.startswith("perf/") else max
    return run.summary.get(metric, of_intervals(values) if values else None)
