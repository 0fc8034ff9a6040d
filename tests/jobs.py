"""Runs in the background, which a test can wait for, stop and kill; and the results of runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.launch import LAUNCHES, REPOSITORY, Finished, Launcher, Runner, clean_environment
from tests.template import STACKS_SIGNAL

SECONDS_TO_PRINT_STACKS = 0.5
CHECKPOINT_EVERY = 3  # updates
# Dropout, shifts, accumulation, and several epochs of 11 updates, with checkpoints in the middle of
# each.
MLP = (
    *("--dataset", "digits", "--epochs", 8, "--batch-size", 64, "--dropout", 0.2),
    *("--gradient-accumulation-steps", 2, "--log-every", 3, "--checkpoint-every", CHECKPOINT_EVERY),
    *("--hidden-sizes", 64, 48, "--max-shift", 1, "--tracker", "none"),
)
LONG = ("--epochs", 2000)  # longer than any test waits


class Job:
    """A recipe that runs in the background, in a process group of its own."""

    def __init__(
        self,
        runner: Runner,
        recipe: str | Path,
        *flags: object,
        directory: Path,
        launcher: Launcher = "fork",
        environment: Mapping[str, str] | None = None,
        forking: bool = False,
    ) -> None:
        """Start it; the arguments are those of `Runner.run` and `Runner.start`."""
        script = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
        self.script = str(script)
        self.launcher = launcher
        self.directory = directory
        self.started: dict[int, psutil.Process] = {}
        self.log = directory.with_name(f"{directory.name}-{time.monotonic_ns()}.log")
        with self.log.open("w") as log:
            self.process = runner.start(
                [self.script, *map(str, flags)],
                launcher,
                {**clean_environment(runner.folder), **(environment or {})},
                directory.parent,
                log,
                log,
                forking=forking,
            )

    def printed(self) -> str:
        """Return all output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train, by rank: the recipe itself under plain Python."""
        parent = psutil.Process(self.process.pid)
        children = sorted(parent.children(), key=lambda child: child.pid)
        launch = LAUNCHES[self.launcher]
        if launch.is_fork:  # the children were forked in the order of their ranks
            return children if launch.ranks > 1 else [parent]
        child_by_rank = {}
        for child in children:
            if self.script in child.cmdline():
                child_by_rank[int(child.environ().get("RANK", "0"))] = child
        return [child_by_rank[rank] for rank in sorted(child_by_rank)] or [parent]

    def all_started(self) -> list[psutil.Process]:
        """Return all processes of the job seen so far, also those that outlived their parent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(True):
                self.started[child.pid] = child
        return [*self.started.values()]

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Wait until `condition` holds; fail if the job ends or time runs out before."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended too early:\n{self.printed()[-4000:]}"
            assert time.monotonic() < deadline, f"waited {timeout} s:\n{self.printed()[-4000:]}"
            time.sleep(0.002)

    def wait_for_step(self, step: int) -> None:
        """Wait until a checkpoint of `step` or later is complete."""
        self.wait_until(lambda: newest_step(self.directory) >= step)

    def kill(self) -> None:
        """Kill every process of the job at once, as a power cut would."""
        for child in self.all_started():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.kill()
        self.process.wait(30)

    def print_stacks(self) -> None:
        """Let every process that is a fork of the template print the stacks of its threads."""
        if not LAUNCHES[self.launcher].is_fork:
            return  # other processes lack the handler, and the signal would end them
        for child in [*self.all_started(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(child.pid, STACKS_SIGNAL)
                time.sleep(SECONDS_TO_PRINT_STACKS)  # so that the stacks do not interleave

    def end(self, timeout: float = 120) -> int:
        """Wait until the launcher and all that it started have ended; return its status."""
        children = self.all_started()
        try:
            status = self.process.wait(timeout)
            left = psutil.wait_procs(children, timeout=timeout)[1]
            assert not left, f"left running: {left}\n{self.printed()[-4000:]}"
        except subprocess.TimeoutExpired:
            self.print_stacks()
            self.kill()
            raise AssertionError(
                f"still running after {timeout} s:\n{self.printed()[-4000:]}"
            ) from None
        return status

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run's directory."""
        return json.loads((self.directory / name).read_text())


def killed_and_resumed(
    runner: Runner,
    script: str | Path,
    *flags: object,
    directory: Path,
    kill_at: int,
    total_steps: int,
    launcher: Launcher = "fork",
) -> Job:
    """Kill a run after a checkpoint of update `kill_at`, and resume it to its end.

    Returns:
        The job that has resumed it.
    """
    words = (*flags, "--output-dir", directory, "--resume", "auto")
    job = Job(runner, script, *words, directory=directory, launcher=launcher)
    job.wait_for_step(kill_at)
    job.kill()
    assert 0 < newest_step(directory) < total_steps, "the kill came too late"
    job = Job(runner, script, *words, directory=directory, launcher=launcher)
    assert job.end(240) == 0, job.printed()
    assert "resuming" in job.printed()
    return job


def killed_copy(run: Finished, directory: Path) -> Path:
    """Return a copy of a run that looks as if it had been killed after its last checkpoint."""
    shutil.copytree(run.directory, directory)
    (directory / "status.json").write_text(json.dumps({"status": "running", "resumable": True}))
    return directory


def assert_same_result(directory: Path, expected: Path) -> None:
    """Check that two runs have the same rows, and the same final weights bit for bit."""
    assert rows_without_clock(directory) == rows_without_clock(expected)
    assert final_weights(directory) == final_weights(expected)


def newest_step(directory: Path) -> int:
    """Return the step of a run's newest finished checkpoint, or -1."""
    names = [path.name for path in directory.glob("checkpoints/step-*")]
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=-1)


def rows_without_clock(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` with the metrics that do not depend on the clock."""
    prefixes = ("train/", "val/", "test/", "progress/")
    rows = []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        rows.append({name: metrics[name] for name in metrics if name.startswith(prefixes)})
    return rows


def final_weights(directory: Path) -> bytes:
    """Return the bytes of the final model."""
    return (directory / "model" / "model.safetensors").read_bytes()


SAMPLE_RECORDER = REPOSITORY / "tests" / "record_samples.py"
# (epoch, update, micro-batch, rank) -> samples.
RecordedSamples = dict[tuple[int, int, int, int], list[int]]


def recorded_samples(folder: Path) -> tuple[RecordedSamples, list[tuple[int, int]], int]:
    """Read what `tests/record_samples.py` wrote down about a run, which may have been resumed.

    Returns:
        The samples of each micro-batch; the epoch and update at which each start of rank 0 began,
        in order; and how many updates rank 0 made or began in all starts together.

    Raises:
        AssertionError: a micro-batch that was made twice had other samples the second time.
    """
    record: RecordedSamples = {}
    beginnings = []
    updates = 0
    for path in sorted(folder.glob("*-rank-*.jsonl")):
        rank = int(path.stem.rpartition("-")[2])
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        for epoch, update, micro_batch, samples in lines:
            key = (epoch, update, micro_batch, rank)
            assert record.setdefault(key, samples) == samples, key
        if rank == 0 and lines:
            beginnings.append((lines[0][0], lines[0][1]))
            updates += len({(epoch, update) for epoch, update, _, _ in lines})
    return record, beginnings, updates
