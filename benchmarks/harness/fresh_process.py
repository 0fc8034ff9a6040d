"""Runs a command in a fresh process until it prints a marker, and measures its time and memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY


@dataclass(frozen=True)
class FreshProcess:
    """The time and memory of a process up to its marker."""

    seconds: float  # from its start to the marker
    peak_mebibytes: float  # largest resident set


def run_fresh(command: Sequence[str], marker: str) -> FreshProcess:
    """Start `command`, wait until it prints a line with `marker`, and end it.

    Raises:
        RuntimeError: when it ends without the marker; with its output.
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
        lines: list[str] = []
        result: FreshProcess | None = None
        for line in process.stdout:
            lines.append(line)
            if marker in line:
                seconds = time.perf_counter() - began
                result = FreshProcess(seconds, peak_of(process.pid))
                break
        process.kill()
        process.communicate()
        if result is None:
            errors.seek(0)
            output = "".join(lines) + errors.read()
            raise RuntimeError(f"{' '.join(command)} failed:\n{output}")
    return result


def peak_of(process_id: int) -> float:
    """Return the largest resident set of a running process so far, in MiB; NaN if unknown.

    `ru_maxrss` would not do: it counts the memory that this process had when it forked.
    """
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return float("nan")
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def seconds_to_marker(process: FreshProcess) -> float:
    """Return the time from the process's start to the marker, in seconds."""
    return process.seconds


def peak_mebibytes(process: FreshProcess) -> float:
    """Return the largest resident set, in MiB."""
    return process.peak_mebibytes
