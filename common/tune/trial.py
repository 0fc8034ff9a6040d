"""A trial's run: a recipe in a process of its own, known by what it leaves in its directory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from common.compare.readers import RunRecord, read_directory
from common.console import say
from common.directory import read_status
from common.errors import UserError
from common.files import open_to_append, writing
from common.platforms import polite_stop_signal, start_in_own_group, watch_for_parent

POLL_SECONDS = 0.2
STOP_SECONDS = 120.0  # in which a recipe finishes its update and saves; then it is killed


def launched(
    options: Sequence[str], recipe: str, words: Sequence[str], directory: Path
) -> list[str]:
    """Return what starts a run, or goes on with it: by `accelerate launch` if that has options."""
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch"] if options else []
    place = ["--output-dir", str(directory), "--resume", "auto"]
    return [sys.executable, *launcher, *options, recipe, *words, *place]


@contextmanager
def working_in(directory: Path, flag: str, again: str) -> Iterator[None]:
    """Make the directory of a flag, and be alone in it; a Ctrl-C ends with how to go on."""
    with writing(f"{flag} {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".lock").touch()
    try:
        with FileLock(directory / ".lock", timeout=0):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            yield
    except Timeout:
        raise UserError(f"{directory} is being used by another process") from None
    except KeyboardInterrupt:
        say(f"stopped: go on with {again}")
        raise SystemExit(130) from None


class TrialRun:
    """Starts, follows and stops a run; one that is finished already is only read."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        """Start it in `directory`, absolute; it ends, saving itself, when this process does."""
        self.directory, self.log = directory, directory.with_name(f"{directory.name}.log")
        self.process: psutil.Popen | None = None
        if read_status(directory).get("status") == "finished":
            return
        with open_to_append(self.log) as log:
            self.process = psutil.Popen(
                command,
                env={"WANDB_RUN_GROUP": directory.parent.name, **os.environ, **watch_for_parent()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is for the search, which passes it on.
                **start_in_own_group(ends_with_parent=True),
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

    def close(self) -> None:
        """Let the run save itself and end, if it has not; kill what does not obey."""
        if self.process is None or not self.is_running():
            return
        # A launcher may end before the recipe that it launched.
        tree = [self.process, *self.process.children(recursive=True)]
        self.process.send_signal(polite_stop_signal())
        for left in psutil.wait_procs(tree, STOP_SECONDS)[1]:
            left.kill()

    def reason(self) -> str:
        """Return why the run failed, in one sentence: its own, or the last that it printed."""
        status = read_status(self.directory)
        if status.get("status") == "failed" and status.get("reason"):
            return str(status["reason"])
        code = self.process.returncode if self.process is not None else 0
        ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        printed = [text for line in lines if (text := line.strip(" │╭╮╰╯─"))]
        errors = [line for line in printed if line.startswith("error: ")]
        said = (errors or printed or ["it printed nothing"])[-1]
        return f"{ended}: {said.removeprefix('error: ')} ({self.log} has all of it)"
