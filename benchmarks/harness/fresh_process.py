"""Runs a command in a process of its own, until it says that it is done; times and weighs it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.recipe_side import REPOSITORY


@dataclass(frozen=True)
class FreshProcess:
    """What a process took up to its marker."""

    seconds: float  # from its start to the marker
    peak_mebibytes: float  # largest resident set


def run_fresh(command: Sequence[str], marker: str) -> FreshProcess:
    """Start `command`, wait until it prints a line with `marker`, and end it.

    Raises:
        RuntimeError: with what it said, when it ends without the marker.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=environment,
        )
        assert process.stdout is not None
        said = []
        seconds, peak = None, float("nan")
        for line in process.stdout:
            said.append(line)
            if marker in line:
                seconds = time.perf_counter() - began
                peak = peak_of(process.pid)
                break
        process.kill()
        process.communicate()
        if seconds is None:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(said)}{errors.read()}")
    return FreshProcess(seconds, peak)


def peak_of(process_id: int) -> float:
    """Return the largest resident set that a running process has had, in MiB; NaN if unknown.

    Not `ru_maxrss`: that counts what this process held when it started the other.
    """
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return float("nan")
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def seconds_to_marker(process: FreshProcess) -> float:
    """Return the time to the marker."""
    return process.seconds


def peak_mebibytes(process: FreshProcess) -> float:
    """Return the peak of the resident set."""
    return process.peak_mebibytes
