"""Which updates of a run `--profile` looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.stopwatch import FIRST_UPDATES

# Updates to time, then to profile; fewer where evaluations or the run's end come in between.
SIZES = (10, 5, 2, 1)


@dataclass(frozen=True)
class Window:
    """Updates, counted from where the run starts or goes on."""

    timed: int  # after this many, updates are timed
    warm_up: int  # after this many the profiler is on, and what it sees is thrown away
    record: int  # after this many it is kept
    end: int  # after this many it is over


def choose_window(first: int, total: int, interrupts: Callable[[int], bool]) -> Window | None:
    """Choose which updates to profile; None if the run is too short.

    Args:
        first: the update that the run starts after.
        total: the run's last update.
        interrupts: whether an evaluation or a checkpoint follows an update. Neither should fall
            between those that are profiled, unless it follows each of them.
    """
    timed = FIRST_UPDATES
    for size in SIZES:
        warming = 2 if size > 1 else 1
        last = total - first - warming - size
        for start in range(timed + size, min(last, timed + size + 10_000) + 1):
            window = Window(timed, start, start + warming, start + warming + size)
            if not any(interrupts(first + n) for n in range(start + 1, window.end)):
                return window
    window = Window(timed, timed + 1, timed + 2, timed + 3)
    return window if first + window.end <= total else None
