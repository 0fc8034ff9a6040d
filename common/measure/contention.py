"""The warning that other programs use the same cores and slow a run down."""

import time

import torch

from common.console import warn
from common.system.platforms.limits import load_average, usable_cores

# A warning needs all of the following.
MIN_SECONDS = 2  # an interval of at least this many seconds
# Less than this share of the CPU time that threads ask for. Without other programs, they get 0.9.
SMALL_SHARE = 0.7
HIGH_LOAD = 1.5  # at least this many threads that want to run, for each core


class ContentionWatch:
    """Watches each interval of a run on a CPU, and warns once if other programs slow it down."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The clock, and this process's CPU seconds, at the last log line.
        self.clocks = (time.perf_counter(), time.process_time())
        self.is_warned = False

    def warn_if_contended(self) -> None:
        """Warn if other programs slowed down the interval that ends with this log line."""
        wall_before, cpu_before = self.clocks
        self.clocks = (time.perf_counter(), time.process_time())
        if self.is_warned or self.device.type != "cpu":
            return
        wall_now, cpu_now = self.clocks
        sentence = contention_sentence(
            wall_now - wall_before,
            cpu_now - cpu_before,
            torch.get_num_threads(),
            usable_cores(),
            load_average(),
        )
        if sentence:
            self.is_warned = True
            warn(sentence)


def contention_sentence(
    wall_seconds: float, cpu_seconds: float, threads: int, cores: int, load: float
) -> str | None:
    """Return a warning if other programs use the same cores; else None.

    Threads that get a small share of CPU time may just wait for data. A high load average may come
    from other ranks or loader workers. Both together mean that threads wait for a core.

    Args:
        wall_seconds: the time of the interval.
        cpu_seconds: the CPU time of all threads of the process in this time.
        threads: the threads with which torch computes.
        cores: the cores that the process may use.
        load: the system's load average.
    """
    share = cpu_seconds / max(wall_seconds * threads, 1e-9)
    is_contended = load >= HIGH_LOAD * cores and share < SMALL_SHARE
    if wall_seconds < MIN_SECONDS or not is_contended:
        return None
    contention = f"other programs use the same cores (load {load:.1f} on {cores})"
    if threads == 1:
        return (
            f"{contention}, so this process gets {share:.0%} of one core: stop the other programs"
        )
    return (
        f"{contention}, so {threads} threads get {share:.0%} of the time they ask for, and wait "
        "for each other: stop the other programs, or try --num-threads 1"
    )
