"""What a run says before it starts of the update and its rate."""

from __future__ import annotations

from typing import Any

from common.track.report import rate_lines


def lines(processes: int, scale: float = 1.0, **flags: Any) -> list[str]:
    """Return what is said of updates of 256 samples."""
    config = {"effective_batch_size": None, "scale_learning_rate": "no", "learning_rate": 0.1}
    environment = {"world_size": processes, "effective_batch_size": 256}
    plan = {"rate_scale": scale, "warmup_steps": 12}
    return rate_lines(config | flags, environment, plan)


def test_larger_update_of_more_processes_is_noticed() -> None:
    """Unless it is what was asked for, or the rate follows it."""
    (notice,) = lines(4)
    assert "4 times that of one process, at the same learning rate" in notice
    assert "--effective-batch-size 64" in notice
    assert lines(1) == []
    assert lines(4, effective_batch_size=256) == []
    (rate,) = lines(4, 2.0, scale_learning_rate="linear")
    assert "0.1 × 2 = 0.2 (linear in the update's samples), after 12 updates" in rate
