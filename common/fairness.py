"""What differs between runs, and what of it keeps their figures from being compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.run_record import RunRecord

# Flags that say where a run is kept or what it is called, or that a fact below tells better.
NOT_COMPARED = {
    *("config", "output_dir", "resume", "run_name", "project", "tags", "tracker"),
    *("mixed_precision", "target_accuracy", "evaluate_only", "keep_checkpoints"),
    "collective_timeout",
}

Fact = Callable[[Mapping[str, Any]], Any]


def environment(name: str) -> Fact:
    """Return what reads one fact of a run's environment."""
    return lambda facts: facts.get("environment", {}).get(name)


def data_set(facts: Mapping[str, Any]) -> str | None:
    """Return a data set's name and the sizes of its splits."""
    data = facts.get("data", {})
    # W&B gives them in another order than the run's own files.
    sizes = ", ".join(f"{name} {size:,}" for name, size in sorted(data.get("sizes", {}).items()))
    return f"{data.get('name')} ({sizes})" if data else None


def model(facts: Mapping[str, Any]) -> str | None:
    """Return a model's name and size."""
    described = facts.get("model", {})
    parameters = described.get("parameters")
    return f"{described.get('name')}, {parameters:,} parameters" if parameters else None


def threads(facts: Mapping[str, Any]) -> int | None:
    """Return how many threads compute, where it is a CPU that does."""
    found = facts.get("environment", {})
    return found.get("threads_per_process") if found.get("device_type") == "cpu" else None


# What two runs must share for their figures to be comparable.
FAIR: dict[str, Fact] = {
    "recipe": lambda facts: facts.get("recipe"),
    "data set": data_set,
    "model": model,
    "device": environment("device"),
    "processes": environment("world_size"),
    "threads per process": threads,
    "effective batch": environment("effective_batch_size"),
}
# What is often compared on purpose: shown where it differs, and not warned of.
SHOWN: dict[str, Fact] = {
    "precision": lambda facts: {"no": "fp32"}.get(
        facts.get("environment", {}).get("mixed_precision"),
        facts.get("environment", {}).get("mixed_precision"),
    ),
    "TF32": environment("tf32"),
    "updates planned": lambda facts: facts.get("plan", {}).get("total_steps"),
    "commit": lambda facts: (facts.get("environment", {}).get("git_commit") or "")[:10] or None,
}


@dataclass(frozen=True)
class Unfairness:
    """One thing in which a run differs from the baseline, so that figures don't compare."""

    run: str
    what: str
    baseline_value: Any
    value: Any


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the flags and facts that are not the same in all runs, with each run's value."""
    flags = {name: None for run in runs for name in run.facts.get("config", {})}
    versions = {name: None for run in runs for name in versions_of(run)}
    found = {
        **{name: [fact(run.facts) for run in runs] for name, fact in (FAIR | SHOWN).items()},
        **{name: [versions_of(run).get(name) for run in runs] for name in versions},
        **{
            f"--{name.replace('_', '-')}": [run.facts.get("config", {}).get(name) for run in runs]
            for name in flags
            if name not in NOT_COMPARED
        },
    }
    return {name: values for name, values in found.items() if any(v != values[0] for v in values)}


def versions_of(run: RunRecord) -> dict[str, str]:
    """Return the versions of Python and of the packages that a run used."""
    found = run.facts.get("environment", {})
    return {"python": found.get("python"), **found.get("versions", {})}


def unfairness(baseline: RunRecord, run: RunRecord) -> list[Unfairness]:
    """Return what keeps a run's figures from being compared with the baseline's."""
    pairs = [(what, fact(baseline.facts), fact(run.facts)) for what, fact in FAIR.items()]
    ours, theirs = versions_of(baseline), versions_of(run)
    pairs += [(name, ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    return [Unfairness(run.name, what, mine, own) for what, mine, own in pairs if mine != own]
