"""Runs one training with its kills and resumes, and measures what it did.

SIGSTOP and SIGKILL are needed, so this runs on POSIX systems only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.harness.ports import free_port
from benchmarks.resume.attempt import (
    RUN_FOLDER,
    TEMPORARY_FOLDER,
    WEIGHTS_FILE,
    Attempt,
    record_name,
)
from benchmarks.resume.contestants import Contestant
from benchmarks.resume.counting import Update, merge_ranks
from benchmarks.resume.failures import exception_line
from benchmarks.resume.kills import Kill
from benchmarks.resume.stopping import build_library, preloading
from benchmarks.resume.task import CLASSES, HIDDEN, PIXELS, write_digits

SECONDS_AT_MOST = 300.0  # of one attempt
SECONDS_BETWEEN_LOOKS = 0.005
BLOCK_BYTES = 512  # the unit of `st_blocks`
PARAMETERS = (PIXELS + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES
# Weights and Adam's two moments, each in four bytes.
CHECKPOINT_BYTES = 3 * 4 * PARAMETERS
MAX_UPDATES_IN_SAVE = 4  # after so many more updates, the save is over or never happened
MAX_REMOVED = 3  # checkpoints that are removed by hand before a training is given up
LAST_LINES = 12  # of the output of an attempt that failed


@dataclass
class Outcome:
    """What a training left behind.

    Attributes:
        attempts: the updates of each attempt that made any.
        logged_steps: of the rows in the framework's own log.
        weights: the file of the final weights; None if the training could not be finished.
        failures: for each resume that failed, the line of its exception.
        retried: how many failed resumes were repeated from the same files.
        removed: how many checkpoints had to be removed by hand.
        written_shares: of each kill in a save: the bytes on the disk, as a share of a checkpoint.
    """

    attempts: list[list[Update]] = field(default_factory=list)
    logged_steps: list[int] = field(default_factory=list)
    weights: Path | None = None
    failures: list[str] = field(default_factory=list)
    retried: int = 0
    removed: int = 0
    written_shares: list[float] = field(default_factory=list)


class AttemptError(Exception):
    """An attempt ended with an error; the message is the end of its output.

    Attributes:
        reason: the line of its exception.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


End = Literal["killed", "finished", "given up"]


def train(contestant: Contestant, kill: Kill, processes: int, folder: Path) -> Outcome:
    """Run a training to its end, with its kills.

    Args:
        folder: an empty one.

    Raises:
        AttemptError: an attempt that resumes nothing failed.
    """
    write_digits(folder)
    training = KilledTraining(contestant, processes, folder)
    end: End = "killed"
    for stop_after in (*kill.updates, None):
        share = kill.share if stop_after is not None else None
        end = training.run_until(stop_after, share)
        if end != "killed":
            break
    outcome = training.outcome
    if end == "finished":
        outcome.weights = folder / WEIGHTS_FILE
        outcome.logged_steps = contestant.logged_steps(folder / RUN_FOLDER)
    return outcome


class KilledTraining:
    """A training of a contestant in a folder, attempt by attempt."""

    def __init__(self, contestant: Contestant, processes: int, folder: Path) -> None:
        self.contestant = contestant
        self.processes = processes
        self.folder = folder
        self.run_folder = folder / RUN_FOLDER
        self.outcome = Outcome()
        self.number = 0  # of the next attempt
        self.was_killed = False
        self.has_repeated = False  # the last resume repeated one that had failed

    def run_until(self, stop_after: int | None, share: float | None) -> End:
        """Start or resume the training; run it until it is killed, or to its end.

        If it can't be resumed, the same command is repeated once: a busy port or a lack of memory
        says nothing about the checkpoint. If that fails, too, the newest checkpoint is removed, as
        its user would do by hand, and the training is resumed from the one before.

        Args:
            stop_after: kill it when this update is recorded; None: run it to the end.
            share: not None: let it write this share of its checkpoint before it is killed.

        Raises:
            AttemptError: the first attempt failed.
        """
        while True:
            attempt = self.next_attempt(stop_after, share)
            try:
                end = self.run(attempt)
            except AttemptError as error:
                if not self.was_killed:
                    raise
                self.outcome.failures.append(error.reason)
                if not self.can_go_on():
                    return "given up"
            else:
                self.was_killed = True
                self.has_repeated = False
                return end

    def can_go_on(self) -> bool:
        """After a failed resume, choose to repeat it or remove a checkpoint; return if possible."""
        if not self.has_repeated:
            self.has_repeated = True
            self.outcome.retried += 1
            return True
        self.has_repeated = False
        return self.remove_newest()

    def next_attempt(self, stop_after: int | None, share: float | None) -> Attempt:
        """Return the next attempt, which resumes from the checkpoint that its user would take."""
        checkpoint = None
        if self.was_killed and (self.contestant.needs_path or self.outcome.removed > 0):
            checkpoint = self.contestant.newest_checkpoint(self.run_folder)
        attempt = Attempt(
            self.number,
            self.contestant.variant,
            stop_after,
            stop_after_bytes=None if share is None else round(share * CHECKPOINT_BYTES),
            is_resumed=self.was_killed,
            checkpoint=None if checkpoint is None else str(checkpoint),
        )
        self.number += 1
        return attempt

    def remove_newest(self) -> bool:
        """Remove the newest checkpoint; return whether another one is left to resume from."""
        newest = self.contestant.newest_checkpoint(self.run_folder)
        if newest is None or self.outcome.removed == MAX_REMOVED:
            return False
        if newest.is_dir():
            shutil.rmtree(newest)
        else:
            newest.unlink()
        self.outcome.removed += 1
        return self.contestant.newest_checkpoint(self.run_folder) is not None

    def run(self, attempt: Attempt) -> End:
        """Run one attempt.

        Raises:
            AttemptError: its command failed, or took too long.
        """
        attempt.write(self.folder)
        command = self.contestant.command(self.folder, attempt, self.processes, free_port())
        log = self.folder / f"attempt-{attempt.number}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if attempt.stop_after_bytes is not None:
            environment |= self.variables_of_stop()
        with log.open("w", encoding="utf-8") as output:
            launcher = psutil.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            end = self.watch(launcher, attempt)
        finally:
            kill_all(launcher, self.ranks(attempt))
        self.outcome.attempts.append(self.recorded_updates(attempt, has_failed=end is None))
        if end is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            words = f"{self.contestant.name}, attempt {attempt.number}:"
            message = "\n".join([words, *text.splitlines()[-LAST_LINES:]])
            if launcher.returncode == -signal.SIGKILL:
                raise AttemptError(message, f"no end after {SECONDS_AT_MOST:.0f} seconds")
            raise AttemptError(message, exception_line(text.replace(str(self.folder), "FOLDER")))
        return end

    def variables_of_stop(self) -> dict[str, str]:
        """Return the variables of the environment with which a process can stop itself in a save.

        Lightning writes into a temporary file and moves it, so temporary files are counted, too.
        """
        temporary = self.folder / TEMPORARY_FOLDER
        temporary.mkdir(exist_ok=True)
        return preloading(build_library(self.folder)) | {"TMPDIR": str(temporary)}

    def watch(self, launcher: psutil.Popen, attempt: Attempt) -> End | None:
        """Wait for an attempt's end, or for the moment to kill it; return None if it failed."""
        began = time.monotonic()
        while time.monotonic() - began < SECONDS_AT_MOST:
            status = launcher.poll()
            if status is not None:
                return "finished" if status == 0 else None
            ranks = self.ranks(attempt)
            if len(ranks) == self.processes and all(is_stopped(rank) for rank in ranks):
                if attempt.stop_after_bytes is not None:
                    written = self.run_into_save(launcher, ranks, attempt)
                    self.outcome.written_shares.append(written)
                return "killed"
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return None

    def run_into_save(
        self, launcher: psutil.Popen, ranks: list[psutil.Process], attempt: Attempt
    ) -> float:
        """Let stopped processes go on until one stops itself in its save; then stop the others.

        Returns:
            The bytes that are new on the disk, as a share of `CHECKPOINT_BYTES`.
        """
        before = files_in(self.folder)
        send(ranks, signal.SIGCONT)
        self.wait_for_stop(launcher, ranks, attempt)
        send(ranks, signal.SIGSTOP)
        files = files_in(self.folder)
        written = sum(size for key, size in files.items() if before.get(key) != size)
        return round(written / CHECKPOINT_BYTES, 3)

    def wait_for_stop(
        self, launcher: psutil.Popen, ranks: list[psutil.Process], attempt: Attempt
    ) -> None:
        """Wait until a process stops itself in a save, or until that save must be over."""
        assert attempt.stop_after is not None
        last_update = attempt.stop_after + MAX_UPDATES_IN_SAVE
        deadline = time.monotonic() + SECONDS_AT_MOST
        while not any(is_stopped(rank) for rank in ranks):
            recorded_update = self.last_recorded_update(attempt)
            is_over = recorded_update >= last_update or launcher.poll() is not None
            if is_over or time.monotonic() > deadline:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def ranks(self, attempt: Attempt) -> list[psutil.Process]:
        """Return the processes that have opened their records of an attempt."""
        processes = []
        for path in self.folder.glob(record_name(attempt.number, 0).replace("-0.", "-*.")):
            lines = read_lines(path)
            if lines:
                with contextlib.suppress(psutil.NoSuchProcess):
                    processes.append(psutil.Process(lines[0]["process"]))
        return processes

    def last_recorded_update(self, attempt: Attempt) -> int:
        """Return the last update in the record of rank 0."""
        lines = read_lines(self.folder / record_name(attempt.number, 0))
        return int(lines[-1].get("update", 0))

    def recorded_updates(self, attempt: Attempt, *, has_failed: bool) -> list[Update]:
        """Return the updates of an attempt; none if it failed before its first."""
        paths = [self.folder / record_name(attempt.number, rank) for rank in range(self.processes)]
        if not all(path.exists() for path in paths):
            return []
        ranks = [list(updates_in(path)) for path in paths]
        # Any update of a failed attempt may be in the record of one process only.
        return merge_ranks(ranks, stopped_at=0 if has_failed else attempt.stop_after)


def updates_in(path: Path) -> Iterator[Update]:
    """Yield the updates in the record of a process."""
    for line in read_lines(path):
        if "update" in line:
            yield Update(line["update"], line["epoch"], tuple(line["samples"]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, without a last line that is incomplete."""
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def files_in(folder: Path) -> dict[tuple[str, int, int], int]:
    """Return the written bytes of each file by its path, inode and time of its last change."""
    sizes = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed or renamed meanwhile
            status = path.stat()
            if path.is_file():
                # safetensors gives a file its full size before it writes.
                written = min(status.st_size, status.st_blocks * BLOCK_BYTES)
                sizes[str(path), status.st_ino, status.st_mtime_ns] = written
    return sizes


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that are left; after SIGSTOP, wait until they are stopped."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    if number == signal.SIGSTOP:
        while not all(is_stopped(process) for process in processes if is_alive(process)):
            time.sleep(SECONDS_BETWEEN_LOOKS)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    try:
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def kill_all(launcher: psutil.Popen, ranks: list[psutil.Process]) -> None:
    """End a launcher and all processes that it has started by SIGKILL."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = launcher.children(recursive=True)
    # The launcher first: it would end the other processes by SIGTERM when it misses one.
    for process in (launcher, *ranks, *children):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()
    psutil.wait_procs([*ranks, *children], timeout=30)
