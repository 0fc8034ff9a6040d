"""Launches scripts on the tested device, and checks that they used it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.jobs import newest_step
from tests.launch import REPOSITORY, Finished

LAUNCH_SECONDS = 300


def environment() -> dict[str, str]:
    """Return the variables of a launch, so that `common` is imported from this repository.

    Folders that `PYTHONPATH` already names stay on it, such as one with further packages.
    """
    folders = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def require_device(directory: Path, device_type: str) -> None:
    """Raise an `AssertionError` unless the run in `directory` used a device of this type."""
    config = json.loads((directory / "config.json").read_text())
    used = config["environment"]["device_type"]
    assert used == device_type, f"the run used {used}, and this test is about {device_type}"


class Launcher:
    """Runs scripts as a user does; each launch fails unless the run used the expected device."""

    def __init__(self, folder: Path, device_type: str) -> None:
        """Run in `folder`, and expect a device such as "cuda"."""
        self.folder = folder
        self.device_type = device_type

    def run(self, script: Path, *flags: object, directory: Path) -> Finished:
        """Run a script to its end; it must succeed and leave its files in `directory`."""
        command = command_of(script, *flags)
        completed = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LAUNCH_SECONDS,
        )
        finished = Finished(
            command,
            completed.returncode,
            completed.stdout,
            completed.stderr,
            directory,
            directory / "wandb",
        )
        finished.check_success()
        require_device(directory, self.device_type)
        return finished

    def kill_after_checkpoint(
        self, script: Path, *flags: object, directory: Path, step: int
    ) -> str:
        """Start a script, kill it once a checkpoint of `step` or later is complete.

        Returns:
            What the script printed.
        """
        with (self.folder / "log").open("w+") as log:
            process = subprocess.Popen(
                command_of(script, *flags),
                cwd=self.folder,
                env=environment(),
                stdout=log,
                stderr=log,
            )
            deadline = time.monotonic() + LAUNCH_SECONDS
            try:
                while newest_step(directory) < step and process.poll() is None:
                    assert time.monotonic() < deadline, "no checkpoint came in time"
                    time.sleep(0.02)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            output = log.read()
        assert newest_step(directory) >= step, output[-4000:]
        require_device(directory, self.device_type)
        return output


def command_of(script: Path, *flags: object) -> list[str]:
    """Return the command that runs a script with this Python."""
    return [sys.executable, str(script), *map(str, flags)]
