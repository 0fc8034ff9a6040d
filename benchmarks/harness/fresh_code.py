"""Runs a few lines of Python in a process of their own."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import REPOSITORY


def printed_by(code: str) -> str:
    """Run code in a new process in the repository, and return what it prints.

    A process of its own leaves no threads behind that would disturb a measurement.

    Raises:
        subprocess.CalledProcessError: the code failed.
    """
    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return completed.stdout
