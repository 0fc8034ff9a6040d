"""Messages of a run: on updates and learning rate, on evaluations, and at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.metric_names import STEP
from common.track.report import (
    batch_advice_lines,
    evaluation_text,
    memory_rows,
    scaled_rate_lines,
    show_plan,
    show_summary,
    training_lines,
)
from common.track.trackers.tracker import Command
from tests.unit.saved_config import saved_config


def lines(processes: int, scale: float = 1.0, **flags: Any) -> list[str]:
    """Return the lines on the learning rate of a run with updates of 256 samples."""
    run = saved_config(
        config=flags,
        environment={"world_size": processes, "effective_batch_size": 256},
        plan={"rate_scale": scale, "warmup_steps": 12, "peak_learning_rate": 0.1 * scale},
    )
    return [*scaled_rate_lines(run), *batch_advice_lines(run)]


def test_larger_update_of_more_processes_is_mentioned() -> None:
    """It is not if a flag asks for it, or if the learning rate scales with it."""
    (notice,) = lines(4)
    assert "4 times the batch of one process, at the same learning rate" in notice
    assert "--effective-batch-size 64" in notice
    assert lines(1) == []
    assert lines(4, effective_batch_size=256) == []
    (rate,) = lines(4, 2.0, scale_learning_rate="linear")
    assert "0.1 × 2 = 0.2 (linear in the update's samples), after 12 updates" in rate


@pytest.mark.parametrize(
    ("epochs", "total_steps", "text"),
    [
        (3, 9, "9 updates: 3 epochs of 3; logged"),
        (4, 9, "9 updates: 4 epochs of 3, cut at 9; logged"),
        (1, 3, "3 updates: 1 epoch of 3; logged"),
        (1, 2, "2 updates: 1 epoch of 3, cut at 2; logged"),
    ],
)
def test_plan_is_cut_only_if_a_flag_cuts_it(epochs: int, total_steps: int, text: str) -> None:
    """`--max-steps` may also be as many updates as the epochs have."""
    flags = {"epochs": epochs, "batch_size": 64, "gradient_accumulation_steps": 1}
    run = saved_config(config=flags, plan={"total_steps": total_steps})
    (line,) = [line for line in training_lines(run) if line.startswith("plan")]
    assert text in line


def test_evaluation_fits_one_line_of_a_terminal() -> None:
    """The line is that of a long run and much data, with its mark."""
    figures = {"loss": 0.123, "accuracy": 0.97, "macro_f1": 0.97, "count": 10_000}
    position = {"progress/epoch": 30.0, STEP: 11_700}
    assert len(evaluation_text(figures, "validation", position) + "  ★ best") <= 100


def test_paths_and_commands_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Users copy them."""
    folder = Path("runs", "x" * 150)
    summary = {"test/accuracy": 0.5, "progress/kept_step": 3, STEP: 3}
    command = f"wandb leet {folder}/wandb/run"
    show_summary(saved_config(), summary, "test", folder, [Command("view", command)], [])
    output = capsys.readouterr().out
    assert f"view    {command}\n" in output
    assert output.count("x") >= 300


@pytest.mark.parametrize(
    ("facts", "is_run", "expected"),
    [
        ({"update": 1200, "run_id": "abc"}, True, ", of update 1,200"),
        ({"update": 1200, "run_id": "abc"}, False, ", of update 1,200 of run abc"),
        ({"update": "the last"}, True, ""),
        ({}, True, ""),
        (None, False, ""),
    ],
)
@pytest.mark.parametrize("named", ["", "model", "model/model.safetensors"])
def test_evaluation_names_the_model_that_it_loaded(
    facts: dict[str, Any] | None,
    is_run: bool,
    expected: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run made no update, so its own update says nothing about the model."""
    (tmp_path / "model").mkdir()
    if facts is not None:
        (tmp_path / "model" / "model.json").write_text(json.dumps(facts))
    if is_run:
        (tmp_path / "status.json").write_text("{}")
    if named and expected:
        expected = ", of update 1,200 of run abc"
    name = str(tmp_path / named)
    run = saved_config(config={"evaluate_only": True, "init_from": name})
    summary = {"test/accuracy": 0.5, "progress/kept_step": 0, STEP: 0}
    show_plan(run, "metrics.jsonl only")
    plan = capsys.readouterr().out
    assert f"model   {name}{expected}\n" in plan
    show_summary(run, summary, "test", Path("runs"), [], [])
    table = capsys.readouterr().out
    assert f"{name}{expected} " in table
    assert "update 0" not in table


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_memory_of_several_processes_says_whose_it_is(world_size: int) -> None:
    """The peak may be another rank's than the parts, so the two totals may differ."""
    summary = {"perf/samples_per_second": 9.0, "memory/host_rss_mib": 647.0}
    peak, parts = memory_rows(world_size, summary, [("total", 594.1, 593.9)])
    several = world_size > 1
    assert peak == ["peak memory", "647 MiB" + ", the most of any process" * several]
    assert parts == ["planned → taken", f"MiB{' on rank 0' * several}: total 594.1 → 593.9"]
    assert memory_rows(world_size, {}, []) == []


def shown_rows(split: str, final: float, best: float, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the table that ends a run whose final evaluation read a split."""
    prefix = {"validation": "val", "test": "test"}[split]
    summary = {f"{prefix}/accuracy": final, "val/best_accuracy": best}
    summary |= {"progress/kept_step": 3, STEP: 3}
    show_summary(saved_config(), summary, split, Path("runs"), [], [])
    return capsys.readouterr().out


def test_figure_is_shown_once_if_validation_replaces_test(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The best value has a row of its own only if it differs."""
    assert "best accuracy" not in shown_rows("validation", 0.5, 0.5, capsys)
    assert "best accuracy" in shown_rows("validation", 0.5, 0.75, capsys)
    assert "best accuracy" in shown_rows("test", 0.5, 0.5, capsys)
