"""A trial's run: a recipe in a process of its own, known by what it leaves in its directory."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from common.compare.readers import RunRecord, read_directory
from common.directory import read_status
from common.files import writing
from common.machine import signal_when_parent_ends

POLL_SECONDS = 0.2
STOP_SECONDS = 120.0  # in which a recipe finishes its update and saves; then it is killed


class TrialRun:
    """Starts, follows and stops a run; one that is finished already is only read."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        """Start it in `directory`, absolute; it ends, saving itself, when this process does."""
        self.directory, self.log = directory, directory.with_name(f"{directory.name}.log")
        self.process: psutil.Popen | None = None
        if read_status(directory).get("status") == "finished":
            return
        with writing(str(self.log)), self.log.open("ab") as log:
            self.process = psutil.Popen(
                command,
                env={"WANDB_RUN_GROUP": directory.parent.name, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the search, which passes it on
                preexec_fn=partial(signal_when_parent_ends, signal.SIGTERM),
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def follow(self) -> Iterator[RunRecord]:
        """Yield what the run has left so far, again and again, and once more after its end."""
        running = True
        while running:
            running = self.is_running()  # asked first, to miss nothing that was written before
            if (self.directory / "config.json").exists():
                yield read_directory(self.directory)
            if running:
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Let the run save itself and end, if it has not; kill what does not obey."""
        if self.process is None or not self.is_running():
            return
        # A launcher may end before the recipe that it launched.
        tree = [self.process, *self.process.children(recursive=True)]
        self.process.terminate()
        for left in psutil.wait_procs(tree, STOP_SECONDS)[1]:
            left.kill()

    def reason(self) -> str:
        """Return why the run failed, in one sentence: its own, or the last that it printed."""
        status = read_status(self.directory)
        if status.get("status") == "failed" and status.get("reason"):
            return str(status["reason"])
        code = self.process.returncode if self.process is not None else 0
        ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        printed = [
            text
            for line in self.log.read_text(errors="replace").splitlines()
            if (text := line.strip(" │╭╮╰╯─"))
        ]
        errors = [line for line in printed if line.startswith("error: ")]
        said = (errors or printed or ["it printed nothing"])[-1]
        return f"{ended}: {said.removeprefix('error: ')} ({self.log} has all of it)"
