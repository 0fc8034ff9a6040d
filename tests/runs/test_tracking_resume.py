"""W&B over kills and resumes: one W&B run has all rows of `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.edited_copies import edited
from tests.jobs import CHECKPOINT_EVERY, MLP, Job
from tests.launch import Runner
from tests.runs.test_tracking import history

FLAGS = (*MLP, "--epochs", 12, "--tracker", "wandb")


def halting(folder: Path, step: int) -> Path:
    """Return a recipe that waits at update `step`, so that a kill never comes too late."""
    loop = "        for batch in run.batches(train_loader):\n"
    halt = f"            __import__('time').sleep(3600 * (run.progress.global_step == {step}))\n"
    return edited("mnist_mlp", folder, (loop, loop + halt))


@pytest.mark.slow
def test_killed_and_resumed_is_one_run_with_every_row(runner: Runner, tmp_path: Path) -> None:
    """A run killed before and after its first checkpoint keeps its W&B id and all its rows."""
    directory = tmp_path / "run"
    parent = directory / "wandb"
    flags = (*FLAGS, "--output-dir", directory)
    job = Job(runner, halting(tmp_path, CHECKPOINT_EVERY - 1), *flags, directory=directory)
    job.wait_until(lambda: any(parent.glob("offline-run-*/*.wandb")))
    job.kill()
    job = Job(runner, halting(tmp_path, 14), "--resume", directory, directory=directory)
    job.wait_for_step(12)
    job.kill()
    job = Job(runner, "mnist_mlp", "--resume", directory, directory=directory)
    assert job.end() == 0, job.printed()
    folders = sorted(parent.glob("offline-run-*"))
    assert len(folders) == 3
    # The folders are named offline-run-TIME-ID, with -1 at the end if two begin in one second.
    (run_id,) = {folder.name.split("-")[3] for folder in folders}
    assert job.read("config.json")["wandb_run_id"] == run_id
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    steps = [row["progress/global_step"] for row in rows]
    assert steps == sorted(set(steps))
    # Every third update, and the last of each of the 12 epochs.
    assert set(steps) == {step for step in range(1, 133) if step % 3 == 0 or step % 11 == 0}
    rows_at_wandb: dict[int, dict[str, float]] = {}
    for folder in folders:
        rows_at_wandb |= history(folder)
    for row in rows:
        logged = rows_at_wandb[row["progress/global_step"]]
        for name, value in row.items():
            assert logged[name] == value, (row["progress/global_step"], name)
