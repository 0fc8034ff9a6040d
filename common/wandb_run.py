"""How a run presents itself to W&B: group, type, tags and notes; axes and best values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.config import TrainingConfig

STEP = "progress/global_step"
# W&B's table of runs shows the best of these while a run goes on, not the last.
BEST = {
    "eval/accuracy": "max",
    "eval/f1": "max",
    "eval/loss": "min",
    "train/accuracy": "max",
    "train/loss": "min",
}
LONGEST_TAG = 64  # W&B refuses a run with a longer one


def init_arguments(config: TrainingConfig, facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what `wandb.init` is told of the run; what a `WANDB_*` variable says comes first.

    Names sort, because a run's directory is named by recipe and time unless it was chosen.
    """
    said = os.environ.get
    return {
        "name": config.run_name or said("WANDB_NAME") or name,
        "group": config.group or said("WANDB_RUN_GROUP"),
        "job_type": said("WANDB_JOB_TYPE") or ("evaluate" if config.evaluate_only else "train"),
        "notes": config.notes or said("WANDB_NOTES"),
        "tags": tags(config, facts),
    }


def tags(config: TrainingConfig, facts: Mapping[str, Any]) -> list[str]:
    """Return recipe, data set, precision and device, then what was asked for; each once."""
    environment = facts["environment"]
    precision = environment["mixed_precision"]
    is_cpu = environment["device_type"] == "cpu"
    found = [
        facts["recipe"],
        facts["data"]["name"],
        "fp32" if precision == "no" else precision,
        "cpu" if is_cpu else environment["device"],
        *config.tags,
        *os.environ.get("WANDB_TAGS", "").split(","),
    ]
    return list(dict.fromkeys(tag.strip()[:LONGEST_TAG] for tag in found if tag.strip()))


def define_metrics(run: Any) -> None:
    """Draw every chart over the update, and keep the best values as the run's summary."""
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    for name, best in BEST.items():
        run.define_metric(name, step_metric=STEP, summary=best)


def finish(run: Any, summary: Mapping[str, Any], exit_code: int) -> None:
    """Close a run with its own summary, beside the best values.

    A key holds the value that `summary.json` has, and ``eval/accuracy.max`` the best one: the
    name under which W&B shows it while the run goes on.
    """
    best = {}
    for name, kind in BEST.items():
        value = run.summary.get(name)
        if isinstance(value, Mapping) and kind in value:
            best[f"{name}.{kind}"] = value[kind]
    run.summary.update({**best, **summary})
    run.finish(exit_code=exit_code)
