"""Several attempts at one run: some may resume it, and others are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from safetensors.torch import load_file

from common.checkpoints.folders import step_folders
from common.checkpoints.tensors import write_tensors
from common.storage.digests import signed
from tests.edited_copies import with_line_before_backward
from tests.jobs import (
    CHECKPOINT_EVERY,
    LONG,
    MLP,
    Job,
    final_weights,
    killed_copy,
    newest_step,
    rows_without_clock,
)
from tests.launch import REPOSITORY, Finished, Runner, clean_environment
from tests.unit.recipes import status_of


@pytest.mark.slow
def test_resumed_from_an_older_checkpoint_by_name(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """The run ends as the unbroken one did, even if `status.json` is missing."""
    run = killed_copy(unbroken, directory)
    (run / "status.json").unlink()
    old = step_folders(run / "checkpoints")[0]
    flags = ("--resume", old, "--keep-checkpoints", 1)
    runner.run("mnist_mlp", *flags, launcher="fork", output_directory=False)
    assert status_of(run)["status"] == "finished"
    assert final_weights(run) == final_weights(unbroken.directory)
    assert rows_without_clock(run) == rows_without_clock(unbroken.directory)
    assert len([*(run / "checkpoints").iterdir()]) == 1


def test_checkpoint_that_is_not_there_is_refused(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """A missing checkpoint that `--resume` names is not replaced by the newest one."""
    path = killed_copy(unbroken, directory) / "checkpoints" / "step-00000999"
    refused = runner.run("mnist_mlp", "--resume", path, launcher="fork",
                         output_directory=False, succeeds=False)  # fmt: skip
    assert refused.returncode == 1
    assert "step-00000999 does not exist" in refused.errors


@pytest.mark.parametrize("flags", [("--learning-rate", 0.5), ("--larning-rate", 0.5)])
def test_mistake_after_a_kill_is_not_tried_again(
    runner: Runner, unbroken: Finished, directory: Path, flags: tuple[object, ...]
) -> None:
    """A mistake marks the run as not resumable, but the correct command still resumes it."""
    run = killed_copy(unbroken, directory)
    again = ("--output-dir", run, "--resume", "auto")
    runner.run("mnist_mlp", *again, *flags, launcher="fork", output_directory=False,
               succeeds=False)  # fmt: skip
    status = status_of(run)
    assert status["status"] == "failed"
    assert not status["resumable"]
    if flags[0] == "--learning-rate":
        runner.run("mnist_mlp", *MLP, *again, launcher="fork", output_directory=False)
        assert status_of(run)["status"] == "finished"


def test_config_file_applies_if_there_is_nothing_to_resume(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """The first start with `--config` and `--resume auto` takes its settings from the file."""
    flags = ("--config", unbroken.directory / "config.json", "--max-steps", 2)
    started = runner.run("mnist_mlp", *flags, "--resume", "auto", "--output-dir", directory,
                         launcher="fork", output_directory=False)  # fmt: skip
    assert started.returncode == 0
    config = json.loads((directory / "config.json").read_text())["config"]
    assert config["hidden_sizes"] == unbroken.config["config"]["hidden_sizes"]
    assert config["batch_size"] == 64


@pytest.mark.slow
def test_not_finite_is_found_before_a_checkpoint(
    runner: Runner, directory: Path, tmp_path: Path
) -> None:
    """A NaN ends the run before the next checkpoint, however long the log interval is.

    The last checkpoint is therefore finite, and a resumed run finishes.
    """
    recipe = with_line_before_backward(
        tmp_path, "loss = loss * float('nan') if run.progress.global_step == 13 else loss"
    )
    flags = (*MLP, "--log-every", 90, "--checkpoint-every", 4, "--output-dir", directory)
    job = Job(runner, recipe, *flags, directory=directory)
    assert job.end(60) != 0
    assert "became NaN or infinite in update 16" in job.printed()
    assert newest_step(directory) <= 13
    runner.run("mnist_mlp", "--resume", directory, launcher="fork", output_directory=False)
    assert status_of(directory)["status"] == "finished"


@pytest.mark.slow
def test_killed_first_rank_during_a_save_ends_the_other(runner: Runner, directory: Path) -> None:
    """Rank 1 ends soon instead of waiting for rank 0's part of the checkpoint."""
    flags = (*MLP, *LONG, "--hidden-sizes", 1024, 1024, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two forks")
    job.wait_for_step(CHECKPOINT_EVERY)
    job.wait_until(lambda: any(directory.glob("checkpoints/*.unfinished")))
    job.ranks()[0].kill()
    assert job.end(25) != 0


@pytest.mark.slow
def test_launcher_that_ends_during_start_up_takes_the_recipe_along(
    runner: Runner, directory: Path
) -> None:
    """A launcher may die before the recipe can ask the kernel for a signal on its death.

    The recipe then notices by its parent process.
    """
    job = Job(runner, "mnist_mlp", *MLP, *LONG, "--output-dir", directory, directory=directory,
              launcher="accelerate")  # fmt: skip
    ranks: list[psutil.Process] = []

    def started() -> bool:
        ranks[:] = [rank for rank in job.ranks() if rank.pid != job.process.pid]
        return bool(ranks)

    job.wait_until(started)
    job.process.kill()
    job.process.wait(10)
    try:
        assert not psutil.wait_procs(ranks, timeout=60)[1], job.printed()[-3000:]
    finally:
        for process in ranks:
            if process.is_running():
                process.kill()
    if (directory / "status.json").exists():
        assert status_of(directory)["status"] == "preempted"


@pytest.mark.slow
def test_plain_python_outlives_the_shell_that_started_it(runner: Runner, directory: Path) -> None:
    """A run of `nohup python recipe &` trains on after its shell has ended.

    Only the end of a launcher is a request to stop.
    """
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    flags = map(str, (*MLP, "--epochs", 2, "--output-dir", directory))
    words = [sys.executable, str(recipe), *flags]
    log = directory.with_suffix(".log")
    command = f"nohup {' '.join(words)} >{log} 2>&1 & sleep 0.5"
    environment = clean_environment(runner.folder)
    subprocess.run(["bash", "-c", command], env=environment, check=True)
    deadline = time.monotonic() + 90
    while not (directory / "summary.json").exists():
        assert time.monotonic() < deadline, log.read_text()
        if (directory / "status.json").exists():
            assert status_of(directory)["status"] != "preempted"
        time.sleep(0.1)


def test_all_ranks_report_an_unusable_directory_once(runner: Runner, tmp_path: Path) -> None:
    """Two processes end with one sentence and no traceback if `runs` is a file."""
    (tmp_path / "runs").write_text("")
    refused = runner.run("mnist_mlp", *MLP, launcher="two forks", working_directory=tmp_path,
                         output_directory=False, succeeds=False)  # fmt: skip
    assert refused.returncode != 0
    assert refused.printed().count("error: ") == 1
    assert "can't be made" in refused.printed()
    assert "Traceback" not in refused.printed()


def test_job_in_the_directory_is_reported_before_a_collective_times_out(
    runner: Runner, directory: Path
) -> None:
    """Another job in the directory ends all ranks with one sentence, not with a timeout."""
    directory.mkdir()
    flags = (*MLP, "--output-dir", directory, "--collective-timeout", 4)
    with FileLock(directory / ".lock"):
        refused = runner.run("mnist_mlp", *flags, launcher="two forks", output_directory=False,
                             succeeds=False)  # fmt: skip
    assert refused.returncode != 0
    assert refused.printed().count("error: another job is writing to") == 1
    assert "gloo" not in refused.output + refused.errors
    assert not (directory / "status.json").exists()


@pytest.mark.slow
def test_model_that_a_run_began_with_may_be_gone(
    runner: Runner, directory: Path, tmp_path: Path
) -> None:
    """A resumed run on two processes does not need the folder of `--init-from` any more."""
    begins = runner.run("mnist_mlp", *MLP, "--max-steps", 2, launcher="fork")
    source = shutil.copytree(begins.directory / "model", tmp_path / "source")
    flags = (*MLP, *LONG, "--init-from", source, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two forks")
    job.wait_for_step(CHECKPOINT_EVERY)
    job.kill()
    shutil.rmtree(source)
    again = ("--resume", directory)
    job = Job(runner, "mnist_mlp", *again, directory=directory, launcher="two forks")
    job.wait_for_step(newest_step(directory) + CHECKPOINT_EVERY)
    job.kill()
    assert "resuming" in job.printed()


# The first rank reads in `status.json` that no rank has failed, then the other rank fails, and then
# the first rank writes.
LATE = """
import os, runpy, sys, time
from common.checkpoints.state import Parts
from common.lifecycle.start import starting

RANK = int(os.environ["RANK"])
read_status = starting.read_status
restore = Parts.restore

def read_early(path):
    status = read_status(path)
    time.sleep(1.5 * (1 - RANK))
    return status

def restore_late(*arguments):
    time.sleep(0.7 * RANK)
    return restore(*arguments)

starting.read_status = read_early
Parts.restore = restore_late
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_mistake_of_one_rank_is_reported_once_and_ends_all(
    runner: Runner, distributed_mlp: Finished, directory: Path, tmp_path: Path
) -> None:
    """A file that only rank 1 reads holds another model's tensors: all ranks end with one error.

    The manifest is signed anew, so that the file counts as whole. The first rank is slow, and does
    not overwrite in `status.json` that the other has failed.
    """
    run = killed_copy(distributed_mlp, directory)
    newest = step_folders(run / "checkpoints")[-1]
    tensors = load_file(newest / "rank-1.safetensors")
    broken = {name: value[:1].clone() for name, value in tensors.items() if value.ndim}
    manifest = json.loads((newest / "manifest.json").read_text())
    receipt = write_tensors(newest / "rank-1.safetensors", broken)
    manifest["files"]["rank-1.safetensors"] = receipt.to_json()
    (newest / "manifest.json").write_text(json.dumps(signed(manifest)))
    script = tmp_path / "late.py"
    script.write_text(LATE)
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    refused = runner.run(
        *(script, recipe, "--resume", run),
        launcher="two forks",
        output_directory=False,
        succeeds=False,
        timeout=60,
    )
    assert refused.returncode != 0
    printed = refused.output + refused.errors
    assert printed.count("error: ") == printed.count("by another model") == 1, printed
    assert "Traceback" not in printed
    assert f"{newest} was written by another model" in status_of(run)["reason"]
    assert not status_of(run)["resumable"]


def test_full_disk_stops_the_log_with_a_sentence(runner: Runner, directory: Path) -> None:
    """A run whose `metrics.jsonl` can't be written fails and leaves no half-written file.

    Only the run's directory is on the full file system, so the run can still print the sentence.
    """
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        flags = (*MLP, "--batch-size", 2, "--log-every", 1, "--checkpoint-every", 9999)
        job = Job(runner, "mnist_mlp", *flags, "--output-dir", directory, directory=directory)
        metrics = directory / "metrics.jsonl"
        job.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        with (directory / "fill").open("wb") as file:
            while True:
                try:
                    os.write(file.fileno(), bytes(4096))
                except OSError:
                    break
        assert job.end(60) == 1
        assert "No space left on device" in job.printed()
        assert job.printed().count("error: ") == 1, job.printed()
        assert "Traceback" not in job.printed()
        assert metrics.stat().st_size > 0
        assert not (directory / "summary.json").exists()
        assert not [*directory.glob(".status.json.*")]
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
def test_two_starts_in_one_directory(
    runner: Runner, directory: Path, resume: tuple[object, ...]
) -> None:
    """The second start, with another seed, ends with one sentence and leaves the run unchanged."""
    flags = (*MLP, "--output-dir", directory)
    first = Job(runner, "mnist_mlp", *flags, directory=directory)
    time.sleep(0.3)
    second = Job(runner, "mnist_mlp", *flags, "--seed", 7, *resume, directory=directory)
    assert second.end() != 0
    assert first.end() == 0, first.printed()
    assert second.printed().count("error: ") == 1, second.printed()
    # With `--resume auto` it may read its command line before the first has begun, or after that.
    sentences = ("already contains a run", "with --seed 7 (the run has 0)")
    assert any(sentence in second.printed() for sentence in sentences)
    assert status_of(directory)["status"] == "finished"
    facts = json.loads((directory / "config.json").read_text())
    assert facts["config"]["seed"] == 0
    newest = step_folders(directory / "checkpoints")[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["run_id"] == facts["run_id"] == status_of(directory)["run_id"]
