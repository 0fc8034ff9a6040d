"""What a run says: of the update and its rate, of an evaluation, and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.track.names import STEP
from common.track.report import evaluation_text, rate_lines, show_summary
from tests.unit.saved_config import saved_config


def lines(processes: int, scale: float = 1.0, **flags: Any) -> list[str]:
    """Return what is said of updates of 256 samples."""
    run = saved_config(
        config=flags,
        environment={"world_size": processes, "effective_batch_size": 256},
        plan={"rate_scale": scale, "warmup_steps": 12, "peak_learning_rate": 0.1 * scale},
    )
    return rate_lines(run)


def test_larger_update_of_more_processes_is_noticed() -> None:
    """Unless it is what was asked for, or the rate follows it."""
    (notice,) = lines(4)
    assert "4 times that of one process, at the same learning rate" in notice
    assert "--effective-batch-size 64" in notice
    assert lines(1) == []
    assert lines(4, effective_batch_size=256) == []
    (rate,) = lines(4, 2.0, scale_learning_rate="linear")
    assert "0.1 × 2 = 0.2 (linear in the update's samples), after 12 updates" in rate


def test_an_evaluation_takes_one_line_of_a_usual_terminal() -> None:
    """With its mark, of a long run and much data."""
    figures = {"loss": 0.123, "accuracy": 0.97, "macro_f1": 0.97, "count": 10_000}
    position = {"progress/epoch": 30.0, STEP: 11_700}
    assert len(evaluation_text(figures, "validation", position) + "  ★ best") <= 100


def test_no_path_or_command_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """They are to be copied."""
    folder = Path("runs", "x" * 150)
    summary = {"test/accuracy": 0.5, "progress/kept_step": 3, STEP: 3}
    command = f"wandb leet {folder}/wandb/run"
    show_summary(saved_config(), summary, "test", folder, [command], [])
    said = capsys.readouterr().out
    assert f"view    {command}\n" in said
    assert said.count("x") >= 300


def shown_rows(split: str, final: float, best: float, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the table that ends a run whose final evaluation read a split."""
    prefix = {"validation": "val", "test": "test"}[split]
    summary = {f"{prefix}/accuracy": final, "val/best_accuracy": best}
    summary |= {"progress/kept_step": 3, STEP: 3}
    show_summary(saved_config(), summary, split, Path("runs"), [], [])
    return capsys.readouterr().out


def test_a_figure_is_shown_once_where_validation_stands_in_for_test(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The best value is a row of its own only if it says something new."""
    assert "best accuracy" not in shown_rows("validation", 0.5, 0.5, capsys)
    assert "best accuracy" in shown_rows("validation", 0.5, 0.75, capsys)
    assert "best accuracy" in shown_rows("test", 0.5, 0.5, capsys)
