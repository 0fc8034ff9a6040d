"""Set runs side by side: their figures, and how they stand to the first one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from common.fairness import Unfairness, differences, unfairness
from common.run_record import RunRecord


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, the baseline first."""

    runs: list[RunRecord]
    figures: list[dict[str, Any]]  # of each run; see `figures_of`
    differences: dict[str, list[Any]]  # what is not the same everywhere, and each run's value
    unfair: list[Unfairness]
    target_accuracy: float | None
    target_is_given: bool


def compare(runs: Sequence[RunRecord], target_accuracy: float | None = None) -> Comparison:
    """Compare runs with the first of them.

    Args:
        target_accuracy: 0 … 1, to tell how long each run took to reach it; by default the
            lowest of the runs' best accuracies, which each of them reached.
    """
    best = [max(found) for run in runs if (found := accuracies(run))]
    target = target_accuracy
    if target is None and len(runs) > 1:
        target = min(best, default=None)
    figures = [figures_of(run, target) for run in runs]
    for own in figures:
        own["throughput_ratio"] = ratio(own, figures[0], "samples_per_second")
        same_kind = own["memory_kind"] == figures[0]["memory_kind"]
        own["memory_ratio"] = ratio(own, figures[0], "peak_memory_mib") if same_kind else None
    unfair = [found for run in runs[1:] for found in unfairness(runs[0], run)]
    given = target_accuracy is not None
    return Comparison(list(runs), figures, differences(runs), unfair, target, given)


def accuracies(run: RunRecord) -> list[float]:
    """Return the accuracies of all evaluations that a run logged."""
    return [row["eval/accuracy"] for row in run.rows if "eval/accuracy" in row]


def figures_of(run: RunRecord, target: float | None) -> dict[str, Any]:
    """Return a run's figures; None stands for what isn't known.

    Throughput in samples/s and tokens/s, of the whole run, or the median of the intervals of a
    run that did not get to its end; memory in MiB, the device's or (``memory_kind``) the host's;
    times in seconds; energy in J per sample. ``*_to_target`` is where `target` was first reached.
    """
    summary = run.summary
    sizes = run.facts.get("data", {}).get("sizes", {})
    splits: list[str | None] = [n for n in ("validation", "test") if n in sizes] or [None]
    kind, memory = peak_memory(run)
    selected = summary.get("eval/best_accuracy")
    found = accuracies(run)
    last = run.rows[-1] if run.rows else {}
    figures: dict[str, Any] = {
        "status": status(run),
        "samples_per_second": rate(run, "perf/samples_per_second"),
        "tokens_per_second": rate(run, "perf/tokens_per_second"),
        "mfu": rate(run, "perf/mfu"),
        "goodput": summary.get("perf/goodput"),
        "peak_memory_mib": memory,
        "memory_kind": kind,
        "final_accuracy": summary.get("eval/accuracy"),
        "final_f1": summary.get("eval/f1"),
        "final_loss": summary.get("eval/loss"),
        "final_split": splits[-1],
        "best_accuracy": max(found, default=None) if selected is None else selected,
        "best_split": splits[0],
        "train_seconds": summary.get("time/train_seconds", last.get("time/train_seconds")),
        "total_seconds": summary.get("time/total_seconds"),
        "joules_per_sample": rate(run, "perf/joules_per_sample"),
    }
    reached = None
    if target is not None:
        rows = [row for row in run.rows if row.get("eval/accuracy", -1) >= target]
        reached = rows[0] if rows else None
    figures["reached_target"] = None if target is None or not found else reached is not None
    figures["steps_to_target"] = reached and reached["progress/global_step"]
    figures["seconds_to_target"] = reached and reached.get("time/train_seconds")
    return figures


def status(run: RunRecord) -> str:
    """Return how a run stands; where, if it is not finished."""
    if run.status == "finished":
        return "finished"
    planned = f" of {run.total_steps:,}" if run.total_steps else ""
    return f"{run.status} at step {run.last_step:,}{planned}"


def rate(run: RunRecord, metric: str) -> float | None:
    """Return a rate over the whole run; without a summary, the median of its intervals."""
    values = [row[metric] for row in run.rows if metric in row]
    return run.summary.get(metric, median(values) if values else None)


def peak_memory(run: RunRecord) -> tuple[str | None, float | None]:
    """Return whose memory is known, the device's or the host's, and the most of it, in MiB."""
    for kind, metric in (
        ("device", "memory/peak_allocated_mib"),
        ("host", "memory/host_rss_mib"),
    ):
        values = [row[metric] for row in [*run.rows, run.summary] if row.get(metric) is not None]
        if values:
            return kind, max(values)
    return None, None


def ratio(own: Mapping[str, Any], baseline: Mapping[str, Any], name: str) -> float | None:
    """Return how many times the baseline's figure a run's is; None where one isn't known."""
    return own[name] / baseline[name] if own[name] is not None and baseline[name] else None
