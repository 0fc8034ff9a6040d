"""Set runs side by side: their figures, how they stand to the first one's, and what differs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from common.compare.readers import RunRecord
from common.config import TrainingConfig
from common.flags import role_of, spelled
from common.objective import PREFIXES
from common.track.names import STEP

DEVICE_MEMORY = "memory/peak_allocated_mib"
FIGURES = {
    "peak_memory_mib" if name == DEVICE_MEMORY else name.partition("/")[2]: name
    for name in (
        *("perf/samples_per_second", "perf/tokens_per_second", "perf/mfu", "perf/goodput"),
        *(DEVICE_MEMORY, "perf/joules_per_sample", "time/train_seconds", "time/total_seconds"),
    )
}
TOLD_BETTER = {"mixed_precision"}  # flags that a fact tells as it came to be


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, the baseline first."""

    runs: list[RunRecord]
    figures: list[dict[str, Any]]  # of each run; see `figures_of`
    differences: dict[str, list[Any]]  # what is not the same everywhere, and each run's value
    unfair: list[dict[str, Any]]  # run, what, baseline_value, value: figures don't compare
    target: float | None  # of the baseline's objective
    target_is_given: bool


def compare(runs: Sequence[RunRecord], target: float | None = None) -> Comparison:
    """Compare runs with the first of them.

    Args:
        target: of the objective; by default the worst of the runs' best, which each reached.
    """
    given, goal = target is not None, runs[0].objective
    alike = [run for run in runs if goal is not None and run.objective == goal]
    if goal is not None and not given and len(alike) > 1:
        best = [goal.best(run.values(run.goal)) for run in alike]
        worst = min if goal.mode == "max" else max
        target = worst((value for value in best if value is not None), default=None)
    figures = [figures_of(run, target if run in alike else None) for run in runs]
    for own in figures:
        own["throughput_ratio"] = ratio(own, figures[0], "samples_per_second")
        same_kind = own["memory_kind"] == figures[0]["memory_kind"]
        own["memory_ratio"] = ratio(own, figures[0], "peak_memory_mib") if same_kind else None
    fair = [what_must_be_equal(run) for run in runs]
    facts = [own | shown_where_different(run) for own, run in zip(fair, runs, strict=True)]
    columns = {name: [own.get(name) for own in facts] for name in union(facts)}
    differences = {name: c for name, c in columns.items() if any(v != c[0] for v in c)}
    unfair = [
        {"run": run.name, "what": what, "baseline_value": fair[0].get(what), "value": own.get(what)}
        for run, own in zip(runs, fair, strict=True)
        for what in union([fair[0], own])
        if own.get(what) != fair[0].get(what)
    ]
    return Comparison(list(runs), figures, differences, unfair, target, given)


def union(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def ratio(own: Mapping[str, Any], baseline: Mapping[str, Any], name: str) -> float | None:
    return own[name] / baseline[name] if own[name] is not None and baseline[name] else None


def what_must_be_equal(run: RunRecord) -> dict[str, Any]:
    environment, data, model = (
        run.facts.get(group, {}) for group in ("environment", "data", "architecture")
    )
    # W&B gives them in another order than the run's own files.
    sizes = ", ".join(f"{name} {size:,}" for name, size in sorted(data.get("sizes", {}).items()))
    on_cpu = environment.get("device_type") == "cpu"
    return {
        "recipe": run.facts.get("recipe"),
        "objective": run.facts.get("objective"),
        "data set": f"{data.get('name')} ({sizes})",
        "model": f"{model.get('name')}, {model.get('parameters', 0):,} parameters",
        "device": environment.get("device"),
        "processes": environment.get("world_size"),
        "threads per process": environment.get("threads_per_process") if on_cpu else None,
        "effective batch": environment.get("effective_batch_size"),
        "python": environment.get("python"),
        **environment.get("versions", {}),
    }


def shown_where_different(run: RunRecord) -> dict[str, Any]:
    """Return the flags and facts that are often compared on purpose, and not warned of."""
    environment = run.facts.get("environment", {})
    precision = environment.get("mixed_precision")
    return {
        "precision": "fp32" if precision == "no" else precision,
        "TF32": environment.get("tf32"),
        "updates planned": run.facts.get("plan", {}).get("total_steps"),
        "commit": (environment.get("git_commit") or "")[:10] or None,
        **{
            spelled(name): value
            for name, value in run.facts.get("config", {}).items()
            if role_of(TrainingConfig, name).compared and name not in TOLD_BETTER
        },
    }


def figures_of(run: RunRecord, target: float | None) -> dict[str, Any]:
    """Return a run's figures; None stands for what isn't known.

    Those of `FIGURES`; memory is the device's or (``memory_kind``) the host's; ``final_NAME`` for
    each metric of the final evaluation; ``*_to_target`` is where `target` was first reached.
    """
    summary, goal, objective = run.summary, run.goal, run.objective
    # Neither the best value, nor names with a full stop, which W&B makes.
    finals = re.compile(rf"{PREFIXES[run.splits[1]]}/(?!best_)(\w+)")
    final = {found[1]: summary[name] for name in summary if (found := finals.fullmatch(name))}
    best, reached = None, None
    if objective is not None:
        best = summary.get(objective.best_key, objective.best(run.values(goal)))
        if target is not None:
            rows = (r for r in run.rows if goal in r and objective.reaches(r[goal], target))
            reached = next(rows, None)
    total = run.facts.get("plan", {}).get("total_steps")
    where = f" at step {run.last_step:,}" + (f" of {total:,}" if total else "")
    known = {
        kind: max(values)
        for kind, metric in {"device": DEVICE_MEMORY, "host": "memory/host_rss_mib"}.items()
        if (values := [row[metric] for row in (*run.rows, summary) if metric in row])
    }
    kind = next(iter(known), None)
    return {
        "status": run.status + ("" if run.status == "finished" else where),
        "objective": run.facts.get("objective"),
        **{name: whole(run, metric) for name, metric in FIGURES.items()},
        "peak_memory_mib": known[kind] if kind else None,
        "memory_kind": kind,
        "final_objective": final.get(objective.metric) if objective else None,
        "final_loss": None,
        **{f"final_{name}": value for name, value in final.items()},
        "final_split": run.splits[1],
        "best_objective": best,
        "best_split": run.splits[0],
        "reached_target": None if target is None or not run.values(goal) else reached is not None,
        "steps_to_target": reached and reached[STEP],
        "seconds_to_target": reached and reached.get("time/train_seconds"),
    }


def whole(run: RunRecord, metric: str) -> float | None:
    """Return a figure of the whole run; before its end, the median of its intervals so far."""
    values = run.values(metric)
    of_intervals = median if metric.startswith("perf/") else max
    return run.summary.get(metric, of_intervals(values) if values else None)
