"""Launches recipes in processes that pretend to run on another operating system.

`site/sitecustomize.py` lists the features that these processes lack, and those not simulated.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path
from typing import Literal

from tests.jobs import Job
from tests.launch import REPOSITORY, Finished, Runner

SITE = Path(__file__).parent / "site"
LAUNCH = Path(__file__).with_name("launch.py")
Platform = Literal["windows", "macos"]
PLATFORMS: tuple[Platform, ...] = ("windows", "macos")
# The encoding of a redirected output. That of Windows has no arrows and stars.
ENCODINGS: dict[Platform, str] = {"windows": "cp1252", "macos": "utf-8"}
PATIENCE_SECONDS = 120.0


def pretending(platform: Platform, encoding: str | None = None) -> dict[str, str]:
    """Return the variables with which a Python process pretends to run on `platform`.

    Args:
        encoding: of standard output, strict as Python's own is; None for the platform's.
    """
    return {
        "PYTHONPATH": str(SITE),
        "PRETENDED_PLATFORM": platform,
        "PYTHONIOENCODING": f"{encoding or ENCODINGS[platform]}:strict",
        "PYTHONWARNDEFAULTENCODING": "1",
    }


def launch(
    runner: Runner,
    platform: Platform,
    recipe: str,
    *flags: object,
    encoding: str | None = None,
    succeeds: bool = True,
    output_directory: bool = True,
) -> Finished:
    """Return the shared run of a recipe in a fresh interpreter; tests must not change it."""
    return runner.shared(
        recipe,
        *flags,
        launcher="plain python",
        environment=pretending(platform, encoding),
        succeeds=succeeds,
        output_directory=output_directory,
    )


def launch_fork(
    runner: Runner,
    platform: Platform,
    recipe: str | Path,
    *flags: object,
    encoding: str | None = None,
    succeeds: bool = True,
    output_directory: bool = True,
) -> Finished:
    """Return the run of a recipe in a fork, which is ten times faster; see `launch.py`."""
    script = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
    words = (platform, encoding or ENCODINGS[platform], script, *flags)
    return runner.run(LAUNCH, *words, succeeds=succeeds, output_directory=output_directory)


class PretendedJob(Job):
    """A recipe in the background, on a pretended platform."""

    def __init__(
        self,
        runner: Runner,
        platform: Platform,
        recipe: str,
        *flags: object,
        directory: Path,
    ) -> None:
        """Start the recipe in a fork; the arguments are those of `Job`.

        The processes that it starts are fresh interpreters.
        """
        script = REPOSITORY / "recipes" / f"{recipe}.py"
        words = (platform, ENCODINGS[platform], script, *flags)
        super().__init__(runner, LAUNCH, *words, directory=directory)

    def stop_after(self, line: str, number: int = signal.SIGINT) -> int:
        """Send a signal once the job has printed a line; return its exit status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while line not in self.printed() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(PATIENCE_SECONDS)
        self.process.kill()
        raise AssertionError(f"it did not stop:\n{self.printed()}")
