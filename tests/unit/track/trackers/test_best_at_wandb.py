"""The best value that W&B's summary shows while a run trains."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from common.objective import Objective
from common.track.trackers.wandb_tracker import WandbTracker


def tracker_at(step: int) -> Any:
    """Return a tracker whose W&B run has all rows before `step`."""
    tracker = object.__new__(WandbTracker)
    tracker.objective = Objective.parse("accuracy:max")
    tracker.best = None
    tracker.top_names = {}
    tracker.service = SimpleNamespace(limited=nullcontext)  # type: ignore[assignment]
    tracker.wandb_run = SimpleNamespace(  # type: ignore[assignment]
        step=step, summary={}, log=lambda *arguments, **options: None
    )
    return tracker


@pytest.mark.parametrize("step_at_wandb", [0, 15, 99])
def test_best_value_survives_a_resume(step_at_wandb: int) -> None:
    """W&B may have some of the earlier rows, all of them, or none. A later, worse value is none."""
    earlier_rows = [
        {"progress/global_step": 10, "val/accuracy": 0.5},
        {"progress/global_step": 20, "val/accuracy": 0.75},
        {"progress/global_step": 21, "train/loss": 1.0},
        {"progress/global_step": 30, "val/accuracy": float("nan")},
    ]
    tracker = tracker_at(step_at_wandb)
    tracker.restore_rows(earlier_rows)
    tracker.log({"progress/global_step": 40, "val/accuracy": 0.625})
    assert tracker.wandb_run.summary == {"val/best_accuracy": 0.75}
