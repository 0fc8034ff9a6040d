"""Measures the time since a run began, including its earlier attempts."""

import time
from pathlib import Path
from typing import TypedDict


class ClockState(TypedDict):
    """The clock's part of a checkpoint."""

    seconds: float
    began: float  # the beginning, by the machine's monotonic clock
    boot: str  # the id of the machine's start; see `boot_id`


class RunClock:
    """Seconds since a run began, including its earlier attempts.

    The time between two attempts counts as well, if they ran on one machine that was not rebooted
    in between. Otherwise that time is unknown and left out. Changes of the machine's date and time
    do no harm.
    """

    def __init__(self) -> None:
        self.attempt_began = time.monotonic()  # from the machine's start; no one can set this clock
        self.began = self.attempt_began  # of the run: earlier than this attempt after a resume

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def state_dict(self) -> ClockState:
        return {"seconds": self.seconds, "began": self.began, "boot": boot_id()}

    def load_state_dict(self, state: ClockState) -> None:
        boot = boot_id()
        seconds = float(state["seconds"])
        if boot and state["boot"] == boot:
            # The clock went on between the attempts, so the difference includes the time between.
            seconds = max(seconds, self.attempt_began - float(state["began"]))
        self.began = self.attempt_began - max(seconds, 0.0)


def boot_id() -> str:
    """Return the id that Linux gives to each start of the machine; empty on other systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
