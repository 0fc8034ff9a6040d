"""Stopped anywhere, by anything: the resumed run ends as the uninterrupted one would have."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from common.checkpoint import Checkpoints, damage, newest_whole, step_folders
from common.errors import LostProcessError, UserError
from common.failures import (
    MOST_SKIPS_IN_A_ROW,
    GradientGuard,
    TrainingError,
    is_lost_process,
)
from common.optimizers import start_momentum
from tests.jobs import (
    EVERY,
    MLP,
    RECORDED,
    Job,
    final_weights,
    learned,
    newest_step,
    recorded,
)
from tests.launch import REPOSITORY, Finished, Launcher, Runner, clean_environment, launch_command

LONG = ("--epochs", 2000)  # longer than any test waits


@pytest.fixture(scope="session")
def unbroken(runner: Runner) -> Finished:
    """The run that nothing stops."""
    return runner.run("mnist_mlp", *MLP, launcher="python")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a run that something stops writes."""
    return tmp_path / "run"


def resume(runner: Runner, directory: Path, *flags: object, launcher: Launcher = "python") -> None:
    """Go on with a run until it is done."""
    flags = ("--resume", directory, *flags)
    runner.run("mnist_mlp", *flags, launcher=launcher, output_directory=False)
    assert json.loads((directory / "status.json").read_text())["status"] == "finished"


def copy_of(finished: Finished, directory: Path) -> Path:
    """Return a copy of a run that looks as if it had been killed after its last checkpoint."""
    shutil.copytree(finished.directory, directory)
    (directory / "status.json").write_text(json.dumps({"status": "running"}))
    return directory


# Updates between checkpoints, and flags: several intervals an epoch, each longer than a save takes.
KILLED: dict[str, tuple[int, tuple[object, ...]]] = {
    "mnist_mlp": (
        30,
        (*MLP, "--epochs", 6, "--batch-size", 16),
    ),
    "resnet": (
        5,
        (
            *("--dataset", "digits", "--epochs", 2, "--batch-size", 32, "--log-every", 3),
            *("--gradient-accumulation-steps", 2, "--tracker", "none"),
            *("--data-placement", "workers", "--num-workers", 2),
        ),
    ),
    "bert": (
        5,
        (
            *("--dataset", "docstrings", "--model", "scratch", "--epochs", 2, "--batch-size", 32),
            *("--gradient-accumulation-steps", 2, "--log-every", 3),
            *("--max-length", 64, "--tracker", "none"),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "two"])
@pytest.mark.parametrize("recipe", KILLED)
def test_kills_at_random_moments_change_nothing(
    runner: Runner, tmp_path: Path, recipe: str, launcher: Launcher
) -> None:
    """kill -9 again and again: the same samples, losses and weights, and little work lost."""
    script, (every, flags) = REPOSITORY / "recipes" / f"{recipe}.py", KILLED[recipe]
    flags += ("--checkpoint-every", every)
    whole = runner.run(RECORDED, tmp_path / "whole", script, *flags, launcher=launcher)
    total, per_epoch = (whole.config["plan"][n] for n in ("total_steps", "updates_per_epoch"))
    directory, started_at, middle = tmp_path / "run", [0], 0
    chance = random.Random(recipe + launcher)
    # Each start takes two processes twice as long.
    shares = (0.2, 0.5, 0.8) if launcher == "python" else (0.2, 0.6)
    for kills, stop in enumerate(int(share * total) for share in shares):
        again = ("--resume", directory) if kills else (*flags, "--output-dir", directory)
        job = Job(runner, RECORDED, tmp_path / "killed", script, *again, directory=directory,
                  launcher=launcher)  # fmt: skip
        # Often in the middle of an epoch, and not always just after a checkpoint.
        job.wait_until(
            lambda least=stop: (
                newest_step(directory) >= least and newest_step(directory) % per_epoch != 0
            )
        )
        time.sleep(chance.random() * 0.08)
        job.kill()
        found = newest_step(directory)
        middle += found % per_epoch != 0
        started_at.append(found)
    job = Job(runner, RECORDED, tmp_path / "killed", script, "--resume", directory,
              directory=directory, launcher=launcher)  # fmt: skip
    assert job.end(240) == 0, job.said()[-4000:]
    expected, _, updates = recorded(tmp_path / "whole")
    record, beginnings, made = recorded(tmp_path / "killed")
    assert record == expected
    assert beginnings == [divmod(step, per_epoch) for step in started_at if step < total]
    assert made <= updates + every * (len(started_at) - 1)
    assert learned(directory) == learned(whole.directory)
    assert final_weights(directory) == final_weights(whole.directory)
    assert started_at == sorted(started_at)
    assert started_at[1] >= total // 5
    assert middle >= 1


@pytest.mark.parametrize("launcher", ["accelerate", "two"])
def test_sigterm_to_the_launcher_saves_and_leaves_nothing_running(
    runner: Runner, directory: Path, launcher: Launcher
) -> None:
    """With one process the launcher dies without a word; with two it passes the signal on."""
    job = Job(runner, "mnist_mlp", *MLP, *LONG, "--output-dir", directory, directory=directory,
              launcher=launcher)  # fmt: skip
    job.wait_for_step(EVERY)
    job.process.send_signal(signal.SIGTERM)
    job.end(60)
    status = job.read("status.json")
    assert status["status"] == "preempted", job.said()[-4000:]
    assert status["resumable"]
    assert newest_step(directory) == status["global_step"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_to_the_recipe_then_resume(
    runner: Runner, unbroken: Finished, directory: Path, number: signal.Signals
) -> None:
    """The update is finished, everything saved, and the resumed run ends with the same bits."""
    job = Job(runner, "mnist_mlp", *MLP, "--output-dir", directory, directory=directory)
    job.wait_for_step(EVERY)
    job.process.send_signal(number)
    assert job.end(60) == 75, job.said()[-4000:]
    status = job.read("status.json")
    assert status["status"] == "preempted"
    assert number.name in status["reason"]
    assert newest_step(directory) == status["global_step"]
    resume(runner, directory)
    assert learned(directory) == learned(unbroken.directory)
    assert final_weights(directory) == final_weights(unbroken.directory)


def test_sigterm_to_one_rank_stops_all_at_the_same_update(runner: Runner, directory: Path) -> None:
    """A signal that one rank alone gets is agreed by all."""
    job = Job(runner, "mnist_mlp", *MLP, *LONG, "--output-dir", directory, directory=directory,
              launcher="two")  # fmt: skip
    job.wait_for_step(EVERY)
    job.workers()[1].send_signal(signal.SIGTERM)
    job.end(60)
    status = job.read("status.json")
    assert status["status"] == "preempted", job.said()[-4000:]
    newest = step_folders(directory / "checkpoints")[-1]
    assert damage(newest) is None
    assert {f"rank-{rank}.safetensors" for rank in range(2)} <= {p.name for p in newest.iterdir()}


@pytest.mark.parametrize(("before", "after"), [("two", "python"), ("python", "two")])
def test_another_number_of_processes_trains_on_the_same_samples(
    runner: Runner, directory: Path, tmp_path: Path, before: Launcher, after: Launcher
) -> None:
    """Every sample of the epoch once: fp32 losses agree with those of the unbroken run."""
    same = ("--dropout", 0, "--mixed-precision", "no", "--epochs", 4)
    accumulation = ("--gradient-accumulation-steps", 1 if before == "two" else 2)
    flags = (*MLP, *same, *accumulation)
    whole = runner.run("mnist_mlp", *flags, launcher=before)
    job = Job(runner, "mnist_mlp", *flags, "--output-dir", directory, directory=directory,
              launcher=before)  # fmt: skip
    job.wait_for_step(EVERY)
    job.kill()
    assert newest_step(directory) < whole.config["plan"]["total_steps"]
    resume(runner, directory, launcher=after)
    for ours, theirs in zip(learned(directory), learned(whole.directory), strict=True):
        assert ours["progress/samples"] == theirs["progress/samples"]
        for name in ("train/loss", "eval/loss"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-3)


def test_kill_during_a_save_leaves_the_old_or_the_new(runner: Runner, directory: Path) -> None:
    """Before the rename the old checkpoint counts, and the leftovers are cleaned up."""
    flags = (*MLP, *LONG, "--hidden-sizes", 1024, 1024, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory)
    job.wait_for_step(EVERY)
    folder = directory / "checkpoints"
    job.wait_until(lambda: any(folder.glob("*.unfinished/*")))
    job.kill()
    assert any(folder.glob("*.unfinished")), "the save was over before the kill"
    kept = newest_step(directory)
    assert kept >= EVERY
    job = Job(runner, "mnist_mlp", "--resume", directory, directory=directory)
    job.wait_until(lambda: f"step-{kept:08d}" in job.said() or newest_step(directory) > kept)
    job.wait_for_step(kept + 1)
    job.kill()
    assert "resuming" in job.said()
    assert "passed over" not in job.said()


def test_every_damaged_file_is_named_and_the_checkpoint_before_is_used(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """Truncated, flipped, missing or replaced by a pickle, in turn for every file."""
    run = copy_of(unbroken, directory)
    old, new = step_folders(run / "checkpoints")
    marker = directory.with_name("executed")
    for path in sorted(new.iterdir()):
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for broken in (whole[:middle], flipped, pickle.dumps(Payload(marker)), None):
            path.unlink() if broken is None else path.write_bytes(broken)
            found, problems = newest_whole(run / "checkpoints")
            assert found == old
            assert path.name in problems[0]
            path.write_bytes(whole)
    assert newest_whole(run / "checkpoints") == (new, [])
    assert not marker.exists()


class Payload:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mknod, (str(self.marker),)


def test_damaged_checkpoint_is_passed_over_by_a_real_resume(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """The run goes on from the one before, says so, and still ends the same."""
    run = copy_of(unbroken, directory)
    new = step_folders(run / "checkpoints")[-1]
    (new / "optimizer.safetensors").write_bytes(b"")
    job = Job(runner, "mnist_mlp", "--resume", run, directory=run)
    assert job.end() == 0, job.said()
    assert "passed over" in job.said()
    assert "optimizer.safetensors" in job.said()
    assert final_weights(run) == final_weights(unbroken.directory)
    assert learned(run) == learned(unbroken.directory)


def test_what_contradicts_a_checkpoint_is_refused_by_name(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """Another recipe, another learning rate, another effective batch: one clear sentence."""
    run = copy_of(unbroken, directory)
    for recipe, flags, word in (
        ("resnet", (), "is a run of mnist_mlp"),
        ("mnist_mlp", ("--learning-rate", 0.5), "--learning-rate 0.5"),
        ("mnist_mlp", ("--batch-size", 7), "effective batch of 128"),
    ):
        refused = runner.run(recipe, "--resume", run, *flags, launcher="python",
                             output_directory=False, succeeds=False)  # fmt: skip
        assert refused.returncode == 1
        assert word in refused.errors
        assert "Traceback" not in refused.errors
    assert final_weights(run) == final_weights(unbroken.directory)


def test_resume_auto_finds_the_unfinished_run_and_leaves_a_finished_one(
    runner: Runner, tmp_path: Path
) -> None:
    """None: start afresh. Unfinished: go on. Finished: say so and exit with 0."""
    flags = (*MLP, "--epochs", 2, "--resume", "auto")
    for expected in ("recipe", "is finished"):
        started = runner.run("mnist_mlp", *flags, "--output-dir", tmp_path / "run",
                             launcher="python", output_directory=False,
                             working_directory=tmp_path)  # fmt: skip
        assert expected in started.output
    unnamed = runner.run("mnist_mlp", *flags, launcher="python", output_directory=False,
                         working_directory=tmp_path)  # fmt: skip
    assert "runs/mnist_mlp-" in unnamed.output
    (found,) = (tmp_path / "runs").iterdir()
    (found / "status.json").write_text(json.dumps({"status": "running"}))
    again = runner.run("mnist_mlp", *flags, launcher="python", output_directory=False,
                       working_directory=tmp_path)  # fmt: skip
    assert f"resuming runs/{found.name}" in again.output
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_full_disk_keeps_the_checkpoint_before(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """On a file system of 1 MB the third save finds no room: said, and the second one loads."""
    folder = directory / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        flags = (*MLP, *LONG, "--hidden-sizes", 200, 100, "--output-dir", directory)
        job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two")
        assert job.end(60) != 0
        assert "No space left on device" in job.said()
        assert job.read("status.json")["status"] == "failed"
        newest, problems = newest_whole(folder)
        assert newest is not None
        assert problems == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def recipe_with(tmp_path: Path, line: str) -> Path:
    """Return a copy of the MLP recipe with `line` put before the backward pass."""
    source = (REPOSITORY / "recipes" / "mnist_mlp.py").read_text()
    backward = "                accelerator.backward(loss)\n"
    assert source.count(backward) == 1
    path = tmp_path / "mnist_mlp.py"
    path.write_text(source.replace(backward, f"                {line}\n{backward}"))
    return path


def test_nan_on_one_rank_is_never_applied(runner: Runner, directory: Path, tmp_path: Path) -> None:
    """All ranks stop by the next log interval; the last checkpoint is finite."""
    condition = "run.global_step == 13 and accelerator.process_index == 1"
    recipe = recipe_with(tmp_path, f"loss = loss * float('nan') if {condition} else loss")
    flags = (*MLP, "--mixed-precision", "no", "--output-dir", directory)
    job = Job(runner, recipe, *flags, directory=directory, launcher="two")
    assert job.end(60) != 0
    assert "not finite by update 15" in job.said()
    assert job.said().count("error: a gradient") == 1
    status = job.read("status.json")
    assert status["status"] == "failed"
    assert not status["resumable"]
    assert max(line["progress/global_step"] for line in learned(directory)) <= 15
    newest = step_folders(directory / "checkpoints")[-1]
    for value in load_file(newest / "model.safetensors").values():
        assert value.isfinite().all()


OPTIMIZERS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.AdamW, {"fused": False}),
    (torch.optim.Adadelta, {}),  # has no fused kernel
]


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("most", [1.0, 0.0])
def test_skipped_update_changes_no_weight(
    kind: type[torch.optim.Optimizer], settings: dict[str, bool], looks: bool, most: float
) -> None:
    """A non-finite gradient leaves parameters and optimizer state as they were."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = accelerator.prepare(kind(model.parameters(), lr=0.1, **settings))
    start_momentum(optimizer.optimizer)
    guard = GradientGuard(accelerator, most)
    guard.looks = looks
    for update, factor in enumerate((1.0, math.nan, math.inf, 1.0)):
        before = [parameter.clone() for parameter in model.parameters()]
        (model(torch.ones(1, 3)).sum() * factor).backward()
        guard.clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old) == (update in (1, 2))
    with pytest.raises(TrainingError):
        guard.check(1)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("size", [0.01, 100.0])
def test_clipping_is_that_of_torch(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, bool],
    looks: bool,
    scale: float | None,
    size: float,
) -> None:
    """Weights after two updates are those that `clip_grad_norm_` gives, also with a loss scale."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (kind(model.parameters(), lr=0.1, **settings) for model in models)
    optimizer = accelerator.prepare(ours)
    guard = GradientGuard(accelerator, max_grad_norm=1.0)
    guard.looks = looks and scale is None
    for _ in range(2):
        loss = models[0](torch.ones(1, 3)).square().sum() * size
        (accelerator.scaler.scale(loss) if scale else loss).backward()
        if scale:  # as Accelerate does for fp16, which is not to be had here
            accelerator.scaler.unscale_(ours)
        guard.clip(models[0], optimizer)
        optimizer.step()
        optimizer.zero_grad()
        (models[1](torch.ones(1, 3)).square().sum() * size).backward()
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert guard.check(1) == 0


def test_overflow_after_overflow_is_capped() -> None:
    """fp16's scaler, driven on the CPU: a clear end before the loss scale reaches 0."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = torch.nn.Linear(3, 2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1, fused=True))
    guard = GradientGuard(accelerator, max_grad_norm=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(MOST_SKIPS_IN_A_ROW):
        assert guard.check(1) < MOST_SKIPS_IN_A_ROW
        accelerator.scaler.scale(model(torch.ones(1, 3)).sum() * math.inf).backward()
        guard.clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(TrainingError, match="overflowed"):
        guard.check(2)
    assert accelerator.scaler.get_scale() > 0
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError('CUDA out of memory. Tried')",
                                   "RuntimeError('CUDA error: out of memory')"])  # fmt: skip
def test_out_of_memory_on_one_rank_ends_all_with_advice_once(
    runner: Runner, directory: Path, tmp_path: Path, error: str
) -> None:
    """In both of torch's wordings: the batch, the peak, and a command that goes on and works."""
    condition = "run.global_step == 7 and accelerator.process_index == 1"
    line = f"if {condition}: raise {error}"
    flags = (*MLP, "--output-dir", directory)
    job = Job(runner, recipe_with(tmp_path, line), *flags, directory=directory, launcher="two")
    assert job.end(60) != 0
    advice = "--batch-size 32 --gradient-accumulation-steps 4"
    assert job.said().count(advice) == 1, job.said()[-4000:]
    assert "out of memory" in job.read("status.json")["reason"]
    assert not job.read("status.json")["resumable"]
    resume(runner, directory, *advice.split(), launcher="two")


def test_exception_on_one_rank_ends_all_and_names_the_cause(
    runner: Runner, directory: Path, tmp_path: Path
) -> None:
    """`status.json` has the rank and the error, whoever was ended because of it."""
    condition = "run.global_step == 7 and accelerator.process_index == 1"
    recipe = recipe_with(tmp_path, f"assert not ({condition}), 'a broken sample'")
    flags = (*MLP, "--output-dir", directory)
    job = Job(runner, recipe, *flags, directory=directory, launcher="two")
    assert job.end(60) != 0
    status = job.read("status.json")
    assert status["status"] == "failed", job.said()[-4000:]
    assert "rank 1: AssertionError: a broken sample" in status["reason"]
    assert not status["resumable"]


@pytest.mark.slow
def test_killed_worker_and_the_supervisor_line(
    runner: Runner, unbroken: Finished, directory: Path
) -> None:
    """The job ends promptly, and the README's loop brings it to the same final weights."""
    whole = runner.run("mnist_mlp", *MLP, launcher="two")
    flags = (*MLP, "--output-dir", directory, "--resume", "auto")
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two")
    job.wait_for_step(EVERY)
    job.workers()[1].kill()
    assert job.end(60) != 0
    assert job.read("status.json")["resumable"], job.read("status.json")
    command = " ".join(
        map(str, [*launch_command("two"), REPOSITORY / "recipes/mnist_mlp.py", *flags])
    )
    readme = (REPOSITORY / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("until accelerate")]
    loop = line.replace("runs/mine", str(directory)).split("; do ")[1]
    environment = clean_environment(runner.folder)
    subprocess.run(["bash", "-c", f"until {command}; do {loop}"], env=environment, check=True,
                   timeout=240, cwd=directory.parent)  # fmt: skip
    assert final_weights(directory) == final_weights(whole.directory)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_worker_of_the_loader_can_be_restarted_after(
    runner: Runner, directory: Path, workers: int
) -> None:
    """A process that makes batches is killed, as for want of memory: the job ends, and says so."""
    placement = ("--data-placement", "workers", "--num-workers", workers)
    flags = (*MLP, *LONG, *placement, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory)
    job.wait_for_step(EVERY)

    def killed() -> bool:
        children = psutil.Process(job.process.pid).children()
        if len(children) < workers:
            return False
        for other in children[1:]:  # as one that waits for ever for what the killed one held
            other.suspend()
        children[0].kill()
        return True

    job.wait_until(killed)
    assert job.end(60) != 0
    status = job.read("status.json")
    assert status["resumable"], status
    assert "worker" in status["reason"]


@pytest.mark.slow
def test_stopped_worker_ends_the_job_within_the_time_out(runner: Runner, directory: Path) -> None:
    """A rank that hangs, its part of a checkpoint not written: the others don't wait for that."""
    flags = (*MLP, *LONG, "--collective-timeout", 5, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two")
    job.wait_for_step(EVERY)
    job.wait_until(lambda: any(directory.glob("checkpoints/*.unfinished")))
    stopped = job.workers()[1]
    stopped.send_signal(signal.SIGSTOP)
    try:
        assert job.end(65) != 0
    finally:
        if psutil.pid_exists(stopped.pid):
            stopped.kill()
    status = job.read("status.json")
    assert status["status"] == "failed", job.said()[-4000:]
    assert "imed out" in status["reason"]


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_rank_that_writes_nothing_is_named_in_time(tmp_path: Path, rank: int, other: int) -> None:
    """The end of a run waits for a checkpoint no longer than for a collective."""
    checkpoints = Checkpoints(tmp_path, rank, world_size=2, keep=1, patience=0.1)
    checkpoints.save(1, {f"rank-{rank}.safetensors": {"weight": torch.zeros(2)}}, {})
    with pytest.raises(LostProcessError, match=f"rank {other} timed out") as lost:
        checkpoints.wait()
    assert is_lost_process(lost.value)
    assert not step_folders(tmp_path)


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    """What is not safetensors is never executed, also where the manifest vouches for it."""
    from common.checkpoint import read_tensors

    marker = tmp_path / "executed"
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(UserError):
        read_tensors(tmp_path, "model.safetensors")
    assert not marker.exists()
