"""Times a training loop without its first updates.

The first updates of a loop initialise libraries, choose kernels, record graphs and compile. All of
that happens once, so it must not count in the ratio of two loops.
"""

from __future__ import annotations

import time

from benchmarks.harness.isolation import synchronize


class LoopClock:
    """Measures the wall time between two synchronised points of a loop."""

    def __init__(self, untimed: int) -> None:
        """Leave out the first `untimed` updates."""
        self.untimed = untimed
        self.began: float | None = None

    def start(self) -> None:
        """Mark the beginning of the loop; the clock starts here if every update is timed."""
        if self.untimed == 0:
            self.began = now()

    def update(self) -> None:
        """Mark the end of an update."""
        if self.began is None:
            self.untimed -= 1
            self.start()

    def stop(self) -> float:
        """Return the seconds since the clock started.

        Raises:
            RuntimeError: when the loop ended before the clock started.
        """
        if self.began is None:
            raise RuntimeError(f"the loop ended {self.untimed} updates before its clock started")
        return now() - self.began


def now() -> float:
    """Wait until the device has finished its work, then return the time in seconds."""
    synchronize()
    return time.perf_counter()
