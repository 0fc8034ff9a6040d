"""One trial of a search: a recipe in a process of its own, watched through its `metrics.jsonl`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from common.errors import UserError
from common.run_reader import read_lines, read_object

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
# A recipe finishes its update and saves within this; then it is killed.
STOP_SECONDS = 120.0


class TrialRun:
    """A run that a search starts, watches, and may stop."""

    def __init__(self, command: Sequence[str], directory: Path, environment: dict[str, str]):
        """Take note of what to run.

        Args:
            command: it names `directory`, and goes on with what it holds.
            directory: of the run, absolute: its processes are known by it.
        """
        self.command = list(command)
        self.directory = directory
        self.environment = environment
        self.log = directory.with_name(f"{directory.name}.log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the run; it ends, saving itself, when this process does.

        Raises:
            UserError: when an earlier search's process still trains in the directory.
        """
        left = self.wait_for_processes(STOP_SECONDS)
        if left:
            raise UserError(f"process {left[0].pid} still trains in {self.directory}: end it first")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the search, which passes it on
                preexec_fn=end_with_parent,
            )

    @property
    def is_running(self) -> bool:
        """Whether the process that was started goes on."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Let the run save itself and end; kill it if it does not."""
        if self.process is None:
            return
        if self.is_running:
            self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        # A launcher may end before the recipe that it launched.
        for left in self.wait_for_processes(STOP_SECONDS):
            left.kill()

    def wait_for_processes(self, seconds: float) -> list[psutil.Process]:
        """Wait until nothing runs that names the directory; return what still does."""
        deadline = time.monotonic() + seconds
        while True:
            left = [
                process
                for process in psutil.process_iter(["cmdline", "status"])
                if str(self.directory) in (process.info["cmdline"] or [])
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl` that hold an evaluation, so far."""
        rows = read_lines(self.directory / "metrics.jsonl")
        return [dict(row) for row in rows if row.get("eval/accuracy") is not None]

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run, empty where there is none."""
        return read_object(self.directory / name) or {}

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.read("status.json").get("status") == "finished"

    def reason(self) -> str:
        """Return why the run failed, in one sentence: its own, or the last that it printed."""
        status = self.read("status.json")
        if status.get("status") == "failed" and status.get("reason"):
            return str(status["reason"])
        code = self.process.returncode if self.process is not None else 0
        ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        printed = [line.strip(" │╭╮╰╯─") for line in lines]
        errors = [line for line in printed if line.startswith("error: ")]
        said = (errors or [line for line in printed if line] or ["it printed nothing"])[-1]
        return f"{ended}: {said.removeprefix('error: ')} ({self.log} has all of it)"


def end_with_parent() -> None:
    """Ask Linux to stop this process when the search is gone, even by a kill."""
    if LIBC is not None:
        LIBC.prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
