"""Times a training loop after updates that are not counted.

The first updates of a loop initialise libraries, choose kernels, record graphs and compile. All of
that happens once, so a ratio of two loops must not contain it.
"""

from __future__ import annotations

import time

from benchmarks.harness.isolation import synchronize


class LoopClock:
    """Measures the wall time between two synchronised points of a loop."""

    def __init__(self, untimed: int) -> None:
        """Leave the first `untimed` updates out."""
        self.untimed = untimed
        self.began: float | None = None

    def start(self) -> None:
        """Begin the loop; the clock starts here if every update is timed."""
        if self.untimed == 0:
            self.began = now()

    def update(self) -> None:
        """Note the end of an update."""
        if self.began is None:
            self.untimed -= 1
            self.start()

    def stop(self) -> float:
        """Return the seconds since the clock started.

        Raises:
            RuntimeError: when the loop made fewer updates than it was to leave out.
        """
        if self.began is None:
            raise RuntimeError(f"the loop ended {self.untimed} updates before its clock started")
        return now() - self.began


def now() -> float:
    """Return the time in seconds, once the device has done all work that it was given."""
    synchronize()
    return time.perf_counter()
