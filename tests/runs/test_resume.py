"""A resumed run continues the orders of samples and repeats an interrupted evaluation."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from common.checkpoints.folders import step_folders, step_of
from common.training.rank_decisions import CHECKPOINT_SECONDS
from tests.edited_copies import edited
from tests.jobs import (
    CHECKPOINT_EVERY,
    MLP,
    SAMPLE_RECORDER,
    Job,
    final_weights,
    newest_step,
    recorded_samples,
    rows_without_clock,
)
from tests.launch import REPOSITORY, Finished, Launcher, Runner

RECIPE = REPOSITORY / "recipes" / "mnist_mlp.py"
UPDATES = 11  # in an epoch of `MLP`


@pytest.mark.slow
def test_epochs_after_a_resume_have_new_orders_and_those_of_the_unbroken_run(
    runner: Runner, tmp_path: Path
) -> None:
    """A run killed in epoch 1 has four different orders, the same as in the unbroken run."""
    flags = (*MLP, "--epochs", 4, "--num-workers", 0, "--data-placement", "workers")
    whole_folder = tmp_path / "whole"
    folder = tmp_path / "killed"
    directory = tmp_path / "run"
    whole = runner.run(SAMPLE_RECORDER, whole_folder, RECIPE, *flags, launcher="fork")
    job = Job(runner, SAMPLE_RECORDER, folder, RECIPE, *flags, "--output-dir", directory,
              directory=directory)  # fmt: skip
    job.wait_until(lambda: UPDATES < newest_step(directory) < 2 * UPDATES)
    job.kill()
    saved_step = newest_step(directory)
    assert UPDATES < saved_step < 2 * UPDATES, "the kill came too late for epoch 1"
    job = Job(runner, SAMPLE_RECORDER, folder, RECIPE, "--resume", directory, directory=directory)
    assert job.end() == 0, job.printed()
    expected, _, updates = recorded_samples(whole_folder)
    record, beginnings, total = recorded_samples(folder)
    assert record == expected
    assert beginnings == [(0, 0), divmod(saved_step, UPDATES)]
    # Updates made while a checkpoint is on its way to the disk are repeated as well.
    assert total <= updates + 2 * CHECKPOINT_EVERY
    orders = [
        [sample for (epoch, *_), samples in record.items() if epoch == number for sample in samples]
        for number in range(4)
    ]
    for number, order in enumerate(orders):
        assert len(set(order)) == len(order) == UPDATES * 128
        assert order not in orders[:number]
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)
    assert final_weights(directory) == final_weights(whole.directory)


def test_short_epochs_have_few_checkpoints(whole_mlp: Finished) -> None:
    """A run of three short epochs saves after the first epoch and at its end only.

    This holds where the run took less than the seconds between checkpoints.
    """
    plan = whole_mlp.config["plan"]
    steps = [step_of(path) for path in step_folders(whole_mlp.directory / "checkpoints")]
    if whole_mlp.summary["time/total_seconds"] < CHECKPOINT_SECONDS:
        assert steps == [plan["updates_per_epoch"], plan["total_steps"]]


# Evaluations of 23 batches on one process and 12 on two.
SLOW = ("--batch-size", 16, "--epochs", 2, "--checkpoint-every", 1000)
SLEEP = 2


def slow_evaluation(folder: Path) -> Path:
    """Return a copy of the MLP recipe whose evaluations take longer than a stop may.

    The rehearsal before the first update is not slowed: the signals are for real evaluations.
    """
    line = "            loss, logits = compute_loss(bare_model, batch)\n"
    is_real = "if not run.evaluations.rehearsal.is_reading:"
    pause = f"(run.directory.path / 'evaluating').touch(); __import__('time').sleep({SLEEP})"
    return edited("mnist_mlp", folder, (line, f"            {is_real} {pause}\n{line}"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "two forks"])
def test_signal_cuts_an_evaluation_short(
    runner: Runner, tmp_path: Path, launcher: Launcher
) -> None:
    """A signal during an evaluation saves soon, and a resume repeats the evaluation.

    The rows and weights are those of a run that nobody stopped. This holds for an evaluation in
    the middle of a run and for the final one.
    """
    flags = (*MLP, *SLOW, "--gradient-accumulation-steps", 8 if launcher == "fork" else 4)
    whole = runner.run("mnist_mlp", *flags, launcher=launcher)
    directory = tmp_path / "run"
    slow = slow_evaluation(tmp_path)
    again: tuple[object, ...] = (*flags, "--output-dir", directory)
    # The evaluation at the end of epoch 0, then its repetition, then the final one.
    recipes = [slow, slow, RECIPE] if launcher == "fork" else [slow, RECIPE]
    for recipe in recipes:
        job = Job(runner, recipe, *again, directory=directory, launcher=launcher)
        again = ("--resume", directory)
        if recipe is RECIPE:
            assert job.end() == 0, job.printed()
            break
        job.wait_until((directory / "evaluating").exists)
        (directory / "evaluating").unlink()
        began = time.monotonic()
        # On two processes, rank 1 gets the signal and rank 0 has to learn of it.
        job.ranks()[-1].send_signal(signal.SIGTERM)
        job.end(60)
        assert time.monotonic() - began < 20
        status = job.read("status.json")
        assert status["status"] == "preempted", job.printed()
        assert status["global_step"] == newest_step(directory) == UPDATES
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)
    assert final_weights(directory) == final_weights(whole.directory)


@pytest.mark.slow
def test_end_of_the_launcher_cuts_an_evaluation_short(runner: Runner, tmp_path: Path) -> None:
    """The ranks have lost the launcher's store, but each learns of the launcher's end by itself."""
    flags = (*MLP, *SLOW, "--gradient-accumulation-steps", 4)
    whole = runner.run("mnist_mlp", *flags, launcher="two forks")
    directory = tmp_path / "run"
    slow = slow_evaluation(tmp_path)
    job = Job(runner, slow, *flags, "--output-dir", directory, directory=directory,
              launcher="multi_cpu")  # fmt: skip
    job.wait_until((directory / "evaluating").exists)
    job.all_started()  # remembers the ranks, which outlive the launcher
    job.process.kill()
    job.end(30)
    assert "Traceback" not in job.printed()
    status = job.read("status.json")
    assert status["status"] == "preempted", job.printed()
    assert status["global_step"] == newest_step(directory) == UPDATES
    job = Job(runner, RECIPE, "--resume", directory, directory=directory, launcher="two forks")
    assert job.end() == 0, job.printed()
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)
    assert final_weights(directory) == final_weights(whole.directory)


@pytest.mark.slow
def test_signal_cuts_the_final_evaluation_short(runner: Runner, tmp_path: Path) -> None:
    """A run stopped in its final evaluation repeats only this evaluation when resumed."""
    flags = (*MLP, *SLOW, "--epochs", 1, "--gradient-accumulation-steps", 8)
    directory = tmp_path / "run"
    slow = slow_evaluation(tmp_path)
    job = Job(runner, slow, *flags, "--output-dir", directory, directory=directory)
    job.wait_until((directory / "evaluating").exists)
    job.process.send_signal(signal.SIGTERM)
    assert job.end(20) == 75, job.printed()
    (checkpoint,) = step_folders(directory / "checkpoints")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["global_step"] == UPDATES
    job = Job(runner, RECIPE, "--resume", directory, directory=directory)
    assert job.end() == 0, job.printed()
    rows = rows_without_clock(directory)
    assert [row["progress/global_step"] for row in rows] == [3, 6, 9, 11]
    assert "test/accuracy" in rows[-1]
