"""Requests to stop: taken note of at once, agreed by all ranks, obeyed between two updates."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

# Slurm's --signal=USR1, a cluster's SIGTERM, a person's Ctrl-C; and, from the kernel, that the
# launcher has died: with one process `accelerate launch` does so without telling the recipe.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LAUNCHER_DIED = signal.SIGUSR2
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
# A terminal and a launcher may both pass on one Ctrl-C: that is not yet a second signal.
SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Remembers that a signal asked this process to stop; a second one ends it at once."""

    def __init__(self, heeded: bool = True) -> None:
        """Receive signals from now on.

        Args:
            heeded: whether anybody will look; else a signal ends the process as it always does.
        """
        self.reason: str | None = None
        self.since = 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, self.receive if heeded else signal.SIG_DFL)
        if heeded and sys.platform == "linux" and is_launched():
            signal.signal(LAUNCHER_DIED, self.receive)
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(LAUNCHER_DIED))
            if is_orphan():
                self.receive(LAUNCHER_DIED, None)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.reason is None:
            self.reason, self.since = signal.Signals(number).name, now
            if number == LAUNCHER_DIED:
                self.reason = "the end of its launcher"
        elif number != LAUNCHER_DIED and now - self.since > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def is_made(self) -> bool:
        """Whether this process was asked to stop."""
        return self.reason is not None


def is_launched() -> bool:
    """Whether `accelerate launch` or torchrun started this process."""
    return bool({"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"} & set(os.environ))


def is_orphan() -> bool:
    """Whether the launcher ended before the kernel was asked to tell: then its heir is no Python.

    That took the seconds of the imports.
    """
    try:
        return b"python" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return True
