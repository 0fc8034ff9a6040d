"""A run that is stopped in any way at any moment resumes to the end of the unbroken run."""

from __future__ import annotations

import json
import os
import pickle
import pty
import random
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from common.checkpoints.folders import damage, newest_whole, step_folders
from common.run_directory.identity import saved_run_id
from tests.conftest import first
from tests.damage import Payload
from tests.edited_copies import with_line_before_backward
from tests.jobs import (
    CHECKPOINT_EVERY,
    LONG,
    MLP,
    SAMPLE_RECORDER,
    Job,
    final_weights,
    killed_copy,
    newest_step,
    recorded_samples,
    rows_without_clock,
)
from tests.launch import (
    LAUNCHES,
    REPOSITORY,
    Finished,
    Launcher,
    Runner,
    clean_environment,
    launch_command,
)


def resume(runner: Runner, directory: Path, *flags: object, launcher: Launcher = "fork") -> None:
    """Resume a run and check that it finishes."""
    flags = ("--resume", directory, *flags)
    runner.run("mnist_mlp", *flags, launcher=launcher, output_directory=False)
    assert json.loads((directory / "status.json").read_text())["status"] == "finished"


# Updates between checkpoints, samples of a batch of all processes, and flags: each interval longer
# than a save takes, and some checkpoints in the first half of an epoch.
KILLED: dict[str, tuple[int, int, tuple[object, ...]]] = {
    "mnist_mlp": (30, 16, (*MLP, "--epochs", 4)),
    "resnet": (
        7,
        16,
        (
            *("--epochs", 3, "--gradient-accumulation-steps", 2, "--log-every", 3),
            *("--data-placement", "workers", "--num-workers", 2, "--tracker", "none"),
            *("--image-size", 4),
        ),
    ),
    "cifar10_fast": (
        7,
        16,
        (
            *("--epochs", 3, "--gradient-accumulation-steps", 2, "--log-every", 3),
            *(
                "--widths",
                8,
                16,
                "--image-size",
                16,
                "--horizontal-flip",
                True,
                "--tracker",
                "none",
            ),
        ),
    ),
    "bert": (
        4,
        8,
        (
            *("--epochs", 8, "--gradient-accumulation-steps", 2, "--log-every", 3),
            *("--model", "scratch", "--tracker", "none"),
        ),
    ),
}


@pytest.mark.parametrize(
    ("recipe", "launcher"),
    [
        ("mnist_mlp", "fork"),
        pytest.param("resnet", "fork", marks=pytest.mark.slow),
        pytest.param("bert", "two forks", marks=pytest.mark.slow),
        pytest.param("mnist_mlp", "two forks", marks=pytest.mark.exhaustive),
        pytest.param("cifar10_fast", "two forks", marks=pytest.mark.exhaustive),
    ],
)
def test_kills_at_random_moments_change_nothing(
    runner: Runner,
    odd_images: Path,
    odd_text: Path,
    thin_resnet: Path,
    tmp_path: Path,
    recipe: str,
    launcher: Launcher,
) -> None:
    """Repeated kill -9 changes no sample, loss or weight, and loses little work."""
    script = thin_resnet if recipe == "resnet" else REPOSITORY / "recipes" / f"{recipe}.py"
    every, batch, flags = KILLED[recipe]
    batch //= LAUNCHES[launcher].ranks
    flags += ("--checkpoint-every", every, "--batch-size", batch)
    if recipe != "mnist_mlp":
        flags += ("--dataset", odd_text if recipe == "bert" else odd_images)
    whole = runner.run(SAMPLE_RECORDER, tmp_path / "whole", script, *flags, launcher=launcher)
    total, per_epoch = (whole.config["plan"][n] for n in ("total_steps", "updates_per_epoch"))
    directory = tmp_path / "run"
    shares = (0.25, 0.5) if launcher == "fork" else (0.4,)
    started_at = [0]
    for kill, least in enumerate(int(share * total) for share in shares):
        again = ("--resume", directory) if kill else (*flags, "--output-dir", directory)
        job = Job(runner, SAMPLE_RECORDER, tmp_path / "killed", script, *again, directory=directory,
                  launcher=launcher)  # fmt: skip
        # The last kill comes at once in the first half of an epoch, whose end is a checkpoint too;
        # those before it sooner or later, after any one.
        is_last = kill == len(shares) - 1
        wait_for_step_within_epoch(job, least, per_epoch, per_epoch // 2 if is_last else per_epoch)
        time.sleep(0 if is_last else random.Random(recipe + launcher).random() * 0.08)
        job.kill()
        started_at.append(newest_step(directory))
    # The ResNet's last start has another seed of Python's hashes, as on another day.
    last_launcher: Launcher = "plain python" if recipe == "resnet" else launcher
    job = Job(runner, SAMPLE_RECORDER, tmp_path / "killed", script, "--resume", directory,
              directory=directory, launcher=last_launcher)  # fmt: skip
    assert job.end(240) == 0, job.printed()[-4000:]
    assert_same_samples(tmp_path, started_at, every, total, per_epoch)
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)
    assert final_weights(directory) == final_weights(whole.directory)
    assert started_at == sorted(started_at)
    assert started_at[1] >= int(shares[0] * total)
    assert any(step % per_epoch for step in started_at), "each start was at the end of an epoch"


def wait_for_step_within_epoch(job: Job, least: int, per_epoch: int, end: int) -> None:
    """Wait until the newest checkpoint is of update `least` or later, and before `end` of an epoch.

    The checkpoint at the end of an epoch does not count.
    """

    def is_there() -> bool:
        step = newest_step(job.directory)
        return step >= least and 0 < step % per_epoch < end

    job.wait_until(is_there)


def assert_same_samples(
    folder: Path, started_at: list[int], every: int, total: int, per_epoch: int
) -> None:
    """Check that a killed run used the samples of the whole one, and repeated few updates.

    Args:
        folder: its `whole` and `killed` hold what `record_samples.py` wrote down.
        started_at: the updates from whose checkpoints the killed run started.
        every: updates between checkpoints.
    """
    expected, _, updates = recorded_samples(folder / "whole")
    record, beginnings, updates_made = recorded_samples(folder / "killed")
    assert record == expected
    assert beginnings == [divmod(step, per_epoch) for step in started_at if step < total]
    assert updates_made <= updates + every * (len(started_at) - 1)


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_leaves_nothing_running(
    runner: Runner, directory: Path
) -> None:
    """A run of one process saves although its launcher dies without passing the signal on.

    `test_launch_configs` has the test for two processes.
    """
    job = Job(runner, "mnist_mlp", *MLP, *LONG, "--output-dir", directory, directory=directory,
              launcher="accelerate")  # fmt: skip
    job.wait_for_step(CHECKPOINT_EVERY)
    job.process.send_signal(signal.SIGTERM)
    job.end(60)
    status = job.read("status.json")
    assert status["status"] == "preempted", job.printed()[-4000:]
    assert status["resumable"]
    assert newest_step(directory) == status["global_step"]


@pytest.mark.parametrize(
    "number", first(2, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
)
def test_signal_to_the_recipe_then_resume(
    runner: Runner, unbroken: Finished, directory: Path, number: signal.Signals
) -> None:
    """The run finishes its update and saves, and the resumed run ends with the same bits."""
    is_resumed = number == signal.SIGTERM
    flags = (*MLP, *(() if is_resumed else LONG), "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory)
    job.wait_for_step(CHECKPOINT_EVERY)
    job.process.send_signal(number)
    assert job.end(60) == 75, job.printed()[-4000:]
    status = job.read("status.json")
    assert status["status"] == "preempted"
    assert number.name in status["reason"]
    assert newest_step(directory) == status["global_step"]
    if is_resumed:
        resume(runner, directory)
        assert rows_without_clock(directory) == rows_without_clock(unbroken.directory)
        assert final_weights(directory) == final_weights(unbroken.directory)


def test_terminal_that_closes_saves_the_run(runner: Runner, directory: Path) -> None:
    """A run saves when its terminal closes, though it can no longer print anything."""
    script = str(REPOSITORY / "recipes" / "mnist_mlp.py")
    python = str(runner.python)
    words = [python, script, *map(str, (*MLP, *LONG, "--output-dir", directory))]
    process, terminal = pty.fork()
    if process == 0:
        os.execve(python, words, clean_environment(runner.folder))
    deadline = time.monotonic() + 120
    while newest_step(directory) < CHECKPOINT_EVERY:
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
    status = json.loads((directory / "status.json").read_text())
    assert status["status"] == "preempted"
    assert "SIGHUP" in status["reason"]
    assert newest_step(directory) == status["global_step"]


def test_sigterm_to_one_rank_stops_all_at_the_same_update(runner: Runner, directory: Path) -> None:
    """All ranks stop and save together when only one of them gets a signal."""
    job = Job(runner, "mnist_mlp", *MLP, *LONG, "--output-dir", directory, directory=directory,
              launcher="two forks")  # fmt: skip
    job.wait_for_step(CHECKPOINT_EVERY)
    job.ranks()[1].send_signal(signal.SIGTERM)
    job.end(60)
    status = job.read("status.json")
    assert status["status"] == "preempted", job.printed()[-4000:]
    newest = step_folders(directory / "checkpoints")[-1]
    assert damage(newest) is None
    assert {f"rank-{rank}.safetensors" for rank in range(2)} <= {p.name for p in newest.iterdir()}


@pytest.mark.parametrize("before", first(1, ["two forks", "fork"]))
def test_another_number_of_processes_trains_on_the_same_samples(
    runner: Runner, directory: Path, before: Launcher
) -> None:
    """A run resumed on another number of processes sees each sample of the epoch once.

    Its fp32 losses therefore agree with those of the unbroken run.
    """
    after: Launcher = "fork" if before == "two forks" else "two forks"
    flags = (*MLP, "--dropout", 0, "--mixed-precision", "no", "--epochs", 4)
    whole = runner.shared("mnist_mlp", *flags)  # on one process, which accumulates two batches
    flags += ("--gradient-accumulation-steps", 1 if before == "two forks" else 2)
    job = Job(runner, "mnist_mlp", *flags, "--output-dir", directory, directory=directory,
              launcher=before)  # fmt: skip
    job.wait_for_step(CHECKPOINT_EVERY)
    job.kill()
    assert newest_step(directory) < whole.config["plan"]["total_steps"]
    resume(runner, directory, launcher=after)
    for ours, theirs in zip(
        rows_without_clock(directory), rows_without_clock(whole.directory), strict=True
    ):
        assert ours["progress/samples"] == theirs["progress/samples"]
        for name in ("train/loss", "test/loss"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-3)


@pytest.mark.slow
def test_kill_during_a_save_leaves_the_old_or_the_new(runner: Runner, directory: Path) -> None:
    """A run killed during a save resumes from the checkpoint before, without a warning."""
    flags = (*MLP, *LONG, "--hidden-sizes", 1024, 1024, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory)
    job.wait_for_step(CHECKPOINT_EVERY)
    folder = directory / "checkpoints"
    job.wait_until(lambda: any(folder.glob("*.unfinished/*")))
    job.kill()
    assert any(folder.glob("*.unfinished")), "the save was over before the kill"
    kept = newest_step(directory)
    assert kept >= CHECKPOINT_EVERY
    job = Job(runner, "mnist_mlp", "--resume", directory, directory=directory)
    job.wait_until(lambda: f"step-{kept:08d}" in job.printed() or newest_step(directory) > kept)
    job.wait_for_step(kept + 1)
    job.kill()
    assert "resuming" in job.printed()
    assert "skipped a checkpoint" not in job.printed()


def test_every_damaged_file_is_named_and_the_checkpoint_before_is_used(
    unbroken: Finished, directory: Path
) -> None:
    """Any file that is truncated, altered, missing or a pickle makes the checkpoint unusable.

    The older checkpoint is then chosen, the damaged file named, and no pickle is executed.
    """
    run = killed_copy(unbroken, directory)
    old, new = step_folders(run / "checkpoints")
    marker = directory.with_name("executed")
    for path in sorted(new.iterdir()):
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for broken in (whole[:middle], flipped, pickle.dumps(Payload(marker)), None):
            path.unlink() if broken is None else path.write_bytes(broken)
            chosen, problems = newest_whole(run / "checkpoints", None, saved_run_id(run) or "")
            assert chosen == old
            assert path.name in problems[0]
            path.write_bytes(whole)
    assert newest_whole(run / "checkpoints", None, saved_run_id(run) or "") == (new, [])
    assert not marker.exists()


def test_real_resume_skips_a_damaged_checkpoint(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """A resumed run reports the damaged checkpoint, uses the one before and ends the same."""
    run = killed_copy(unbroken, directory)
    new = step_folders(run / "checkpoints")[-1]
    (new / "optimizer.safetensors").write_bytes(b"")
    job = Job(runner, "mnist_mlp", "--resume", run, directory=run)
    assert job.end() == 0, job.printed()
    assert "skipped a checkpoint" in job.printed()
    assert "optimizer.safetensors" in job.printed()
    assert final_weights(run) == final_weights(unbroken.directory)
    assert rows_without_clock(run) == rows_without_clock(unbroken.directory)


def test_change_that_contradicts_a_checkpoint_is_refused_by_name(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """Another recipe, learning rate or effective batch is refused with a clear sentence."""
    run = killed_copy(unbroken, directory)
    for recipe, flags, word in (
        ("resnet", (), "is a run of mnist_mlp"),
        ("mnist_mlp", ("--learning-rate", 0.5), "--learning-rate 0.5"),
        ("mnist_mlp", ("--batch-size", 7), "has 128 samples"),
    ):
        refused = runner.run(recipe, "--resume", run, *flags, launcher="fork",
                             output_directory=False, succeeds=False)  # fmt: skip
        assert refused.returncode == 1
        assert word in refused.errors
        assert "Traceback" not in refused.errors
    assert final_weights(run) == final_weights(unbroken.directory)


def test_resume_auto_finds_the_unfinished_run_and_leaves_a_finished_one(
    runner: Runner, tmp_path: Path
) -> None:
    """`--resume auto` starts a new run, resumes an unfinished one, and leaves a finished one."""
    flags = (*MLP, "--max-steps", CHECKPOINT_EVERY, "--resume", "auto")
    for expected in ("recipe", "is finished"):
        started = runner.run("mnist_mlp", *flags, "--output-dir", tmp_path / "run",
                             launcher="fork", output_directory=False,
                             working_directory=tmp_path)  # fmt: skip
        assert expected in started.output
    unnamed = runner.run("mnist_mlp", *flags, launcher="fork", output_directory=False,
                         working_directory=tmp_path)  # fmt: skip
    assert "runs/mnist_mlp-" in unnamed.output
    (directory,) = (tmp_path / "runs").iterdir()
    (directory / "status.json").write_text(json.dumps({"status": "running"}))
    again = runner.run("mnist_mlp", *flags, launcher="fork", output_directory=False,
                       working_directory=tmp_path)  # fmt: skip
    assert f"resuming runs/{directory.name}" in again.output
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_full_disk_keeps_the_checkpoint_before(runner: Runner, directory: Path) -> None:
    """A run that fails on a full disk reports it, and its newest checkpoint is whole.

    On this file system of 1 MB, the third save finds no room.
    """
    folder = directory / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        flags = (*MLP, *LONG, "--hidden-sizes", 200, 100, "--output-dir", directory)
        job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two forks")
        assert job.end(60) != 0
        assert "No space left on device" in job.printed()
        assert job.read("status.json")["status"] == "failed"
        newest, problems = newest_whole(folder, None, saved_run_id(directory) or "")
        assert newest is not None
        assert problems == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "seconds_to_exit", [0, pytest.param(8, marks=pytest.mark.slow)], ids=["idle", "busy"]
)
def test_nan_on_one_rank_is_never_applied(
    runner: Runner, directory: Path, tmp_path: Path, seconds_to_exit: int
) -> None:
    """A NaN on one rank stops all ranks by the next log line; the last checkpoint is finite.

    The error is printed once, also if rank 0 takes long to exit.
    """
    condition = "run.progress.global_step == 13 and accelerator.process_index == 1"
    line = f"loss = loss * float('nan') if {condition} else loss"
    if seconds_to_exit:
        delay = f"__import__('atexit').register(__import__('time').sleep, {seconds_to_exit})"
        # Of the update's two micro-batches, only the second is a synchronizing one.
        once = "run.progress.global_step == 13 and accelerator.sync_gradients"
        line += f"; {once} and accelerator.is_main_process and {delay}"
    recipe = with_line_before_backward(tmp_path, line)
    flags = (*MLP, "--mixed-precision", "no", "--output-dir", directory)
    job = Job(runner, recipe, *flags, directory=directory, launcher="two forks")
    assert job.end(60) != 0
    assert "became NaN or infinite in update 15" in job.printed()
    assert job.printed().count("error: a gradient") == 1
    status = job.read("status.json")
    assert status["status"] == "failed"
    assert not status["resumable"]
    assert max(line["progress/global_step"] for line in rows_without_clock(directory)) <= 15
    newest = step_folders(directory / "checkpoints")[-1]
    for value in load_file(newest / "model.safetensors").values():
        assert value.isfinite().all()


@pytest.mark.slow
def test_out_of_memory_on_one_rank_ends_all_with_advice_once(
    runner: Runner, directory: Path, tmp_path: Path
) -> None:
    """The one error message advises flags, and a resume with these flags works."""
    condition = "run.progress.global_step == 7 and accelerator.process_index == 1"
    line = f"if {condition}: raise RuntimeError('CUDA error: out of memory')"
    flags = (*MLP, "--output-dir", directory)
    recipe = with_line_before_backward(tmp_path, line)
    job = Job(runner, recipe, *flags, directory=directory, launcher="two forks")
    assert job.end(60) != 0
    advised_flags = "--batch-size 32 --gradient-accumulation-steps 4"
    assert job.printed().count(advised_flags) == 1, job.printed()[-4000:]
    assert "out of memory" in job.read("status.json")["reason"]
    assert not job.read("status.json")["resumable"]
    resume(runner, directory, *advised_flags.split(), launcher="two forks")


def test_exception_on_one_rank_ends_all_and_names_the_cause(
    runner: Runner, directory: Path, tmp_path: Path
) -> None:
    """`status.json` names the rank and the error that ended the run."""
    condition = "run.progress.global_step == 7 and accelerator.process_index == 1"
    recipe = with_line_before_backward(tmp_path, f"assert not ({condition}), 'a broken sample'")
    flags = (*MLP, "--output-dir", directory)
    job = Job(runner, recipe, *flags, directory=directory, launcher="two forks")
    assert job.end(60) != 0
    status = job.read("status.json")
    assert status["status"] == "failed", job.printed()[-4000:]
    assert "rank 1: AssertionError: a broken sample" in status["reason"]
    assert not status["resumable"]


@pytest.mark.slow
def test_killed_rank_and_the_supervisor_line(runner: Runner, directory: Path) -> None:
    """A killed rank ends the job promptly, and the documented loop leads to the same weights."""
    whole = runner.run("mnist_mlp", *MLP, launcher="two forks")
    flags = (*MLP, "--output-dir", directory, "--resume", "auto")
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two forks")
    job.wait_for_step(CHECKPOINT_EVERY)
    job.ranks()[1].kill()
    assert job.end(60) != 0
    assert job.read("status.json")["resumable"], job.read("status.json")
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    launch = launch_command("multi_cpu", runner.python)
    command = " ".join(map(str, [*launch, recipe, *flags]))
    page = (REPOSITORY / "docs" / "stop-and-resume.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("until ")]
    loop = line.replace("runs/mine", str(directory)).split("; do ")[1]
    environment = clean_environment(runner.folder)
    subprocess.run(["bash", "-c", f"until {command}; do {loop}"], env=environment, check=True,
                   timeout=240, cwd=directory.parent)  # fmt: skip
    assert final_weights(directory) == final_weights(whole.directory)


@pytest.mark.parametrize("workers", first(1, [2, 1]))
def test_killed_worker_of_the_loader_can_be_restarted_after(
    runner: Runner, directory: Path, workers: int
) -> None:
    """A killed loader worker ends the job, which says so and can be resumed."""
    placement = ("--data-placement", "workers", "--num-workers", workers)
    flags = (*MLP, *LONG, *placement, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory)
    job.wait_for_step(CHECKPOINT_EVERY)

    def killed() -> bool:
        children = psutil.Process(job.process.pid).children()
        # The run also calls git, to note which code it uses.
        loader_workers = [child for child in children if child.name() != "git"]
        if len(loader_workers) < workers:
            return False
        # The others stand for workers that wait for ever for a lock of the killed one.
        for other in loader_workers[1:]:
            other.suspend()
        loader_workers[0].kill()
        return True

    job.wait_until(killed)
    assert job.end(60) != 0
    status = job.read("status.json")
    assert status["resumable"], status
    assert "worker" in status["reason"]


@pytest.mark.slow
def test_stopped_rank_ends_the_job_within_the_time_out(runner: Runner, directory: Path) -> None:
    """The other ranks give up on a rank that hangs during a save and mark the run as failed."""
    flags = (*MLP, *LONG, "--collective-timeout", 5, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two forks")
    job.wait_for_step(CHECKPOINT_EVERY)
    job.wait_until(lambda: any(directory.glob("checkpoints/*.unfinished")))
    stopped = job.ranks()[1]
    stopped.send_signal(signal.SIGSTOP)
    try:
        job.wait_until(lambda: job.read("status.json")["status"] != "running", timeout=65)
    finally:
        stopped.kill()  # as the launcher would, half a minute later
    assert job.end(60) != 0
    status = job.read("status.json")
    assert status["status"] == "failed", job.printed()[-4000:]
    assert "imed out" in status["reason"]
