"""Made-up run directories, in the form that recipes write, for tools that read several."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = {
    "recipe": "resnet",
    "objective": "accuracy:max",
    "config": {
        "dataset": "digits",
        "batch_size": 128,
        "learning_rate": 0.1,
        "seed": 0,
        "mixed_precision": "auto",
        "output_dir": None,
        "run_name": None,
        "tags": [],
    },
    "environment": {
        "device": "Some GPU",
        "device_type": "cuda",
        "processor": "Some CPU, AVX2",
        "world_size": 1,
        "mixed_precision": "fp16",
        "effective_batch_size": 128,
        "threads_per_process": 8,
        "python": "3.11.7",
        "versions": {"torch": "2.13.0", "accelerate": "1.15.0"},
        "git_commit": "0123456789abcdef",
    },
    "data": {"name": "digits", "sizes": {"train": 1000, "validation": 100, "test": 200}},
    "architecture": {"name": "resnet18", "parameters": 11_172_810},
    "plan": {"total_steps": 40, "updates_per_epoch": 10, "log_every": 1, "eval_every": 10},
}


def rows(
    values: list[float],
    speed: float = 1000.0,
    seconds: float | None = 2.0,
    metric: str = "accuracy",
    split: str = "val",
) -> list[dict[str, Any]]:
    """Return one row an epoch of 10 updates of 128 samples.

    Args:
        values: of the metric, one an epoch.
        seconds: that an epoch takes; None for rows that don't tell.
    """
    logged_rows = []
    for epoch, value in enumerate(values, start=1):
        row = {
            "train/loss": 2.0 / epoch,
            f"train/{metric}": value - 0.05,
            "perf/samples_per_second": speed,
            "memory/host_rss_mib": 300.0,
            "memory/peak_allocated_mib": 800.0 + epoch,
            "progress/global_step": 10 * epoch,
            "progress/epoch": float(epoch),
            "progress/samples": 1280 * epoch,
            f"{split}/loss": 2.1 / epoch,
            f"{split}/{metric}": value,
            f"{split}/count": 100,
        }
        logged_rows.append(
            row | ({} if seconds is None else {"time/train_seconds": seconds * epoch})
        )
    return logged_rows


def write_run(
    folder: Path,
    changes: dict[str, Any] | None = None,
    logged: list[dict[str, Any]] | None = None,
    summary: dict[str, Any] | None = None,
    **status: Any,
) -> str:
    """Write a run directory and return its path.

    Args:
        changes: to `FACTS`, by path such as ``environment.device``.
        logged: rows of `metrics.jsonl`; by default, four epochs up to accuracy 0.9.
        summary: what to change in `summary.json`.
        status: what to change in `status.json`; without a finished status, there is no summary.
    """
    facts = copy.deepcopy(FACTS)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = value
    logged = rows([0.5, 0.7, 0.85, 0.9]) if logged is None else logged
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    last_step = logged[-1]["progress/global_step"] if logged else 0
    stands = {"status": "finished", "reason": None, "global_step": last_step, **status}
    (folder / "status.json").write_text(json.dumps(stands))
    if stands["status"] == "finished":
        end = {
            **logged[-1],
            **end_of(facts, logged),
            "time/train_seconds": 8.0,
            "time/total_seconds": 10.0,
        }
        (folder / "summary.json").write_text(json.dumps(end | (summary or {})))
    return str(folder)


def end_of(facts: dict[str, Any], logged: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of the final evaluation, which reads test data if there are any."""
    metric, _, mode = facts["objective"].partition(":")
    values = [row[f"val/{metric}"] for row in logged if f"val/{metric}" in row]
    best = {f"val/best_{metric}": (max if mode == "max" else min)(values)} if values else {}
    split = "test" if "test" in facts["data"]["sizes"] else "val"
    return {f"{split}/{metric}": 0.88, f"{split}/loss": 0.5, f"{split}/count": 200, **best}
