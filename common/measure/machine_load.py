"""Measures how much of the machine's CPU time other programs used while a run trained."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields

import psutil
from torch import Tensor

# The system counts CPU time in steps of about 10 ms, so a shorter time says nothing.
MIN_SECONDS = 0.5
# The counters must add up to at least this share of the elapsed time. Some containers show a
# machine whose counters stand still.
MIN_SHARE = 0.5


@dataclass
class CpuTimes:
    """Seconds over all cores of the machine, apart from `elapsed`, which the clock counts."""

    elapsed: float = 0.0
    total: float = 0.0  # busy and idle
    busy: float = 0.0  # all programs, and other virtual machines on the same cores
    own: float = 0.0  # this process and the processes that it started

    @classmethod
    def now(cls) -> "CpuTimes":
        """Read the counters of the system and of this process.

        Where the system shows no counters, their fields are 0.
        """
        try:
            times = psutil.cpu_times()
        except (OSError, psutil.Error):
            return cls(time.monotonic())
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return cls(time.monotonic(), total, total - idle, own_seconds())

    @classmethod
    def of_state(cls, state: Mapping[str, float]) -> "CpuTimes":
        """Return the times from their saved fields."""
        return cls(**{field.name: float(state[field.name]) for field in fields(cls)})

    def plus(self, other: "CpuTimes") -> "CpuTimes":
        """Return the sum of two records, field by field."""
        return CpuTimes(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def since(self, earlier: "CpuTimes") -> "CpuTimes":
        """Return the difference to earlier counters, field by field."""
        return CpuTimes(*(a - b for a, b in zip(self.values(), earlier.values(), strict=True)))

    def values(self) -> list[float]:
        """Return the fields in their order."""
        return [*vars(self).values()]


class MachineLoad:
    """Counts the CPU time of the machine and of this rank from the start of training on.

    Nothing is read while training goes on. The counters are read at the start, when a checkpoint is
    saved, and at the end. A resumed run adds up its attempts, without the time between them.
    """

    def __init__(self) -> None:
        self.earlier = CpuTimes()  # the times of the attempts before this one
        self.start_times: CpuTimes | None = None

    def start(self) -> None:
        """Count from now on, unless counting has begun."""
        if self.start_times is None:
            self.start_times = CpuTimes.now()

    def times(self) -> CpuTimes:
        """Return the times so far, with those of earlier attempts."""
        if self.start_times is None:
            return self.earlier
        return self.earlier.plus(CpuTimes.now().since(self.start_times))

    def state_dict(self) -> dict[str, float]:
        return asdict(self.times())

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.earlier = CpuTimes.of_state(state)


def own_seconds() -> float:
    """Return the CPU seconds of this process and of all processes that it has started.

    Loader workers and compilers are such processes. The system adds the times of a process that has
    ended to those of its parent.
    """
    process = psutil.Process()
    processes = [process]
    with suppress(psutil.Error, OSError):
        processes += process.children(recursive=True)
    seconds = 0.0
    for member in processes:
        with suppress(psutil.Error):  # the process has ended in the meantime
            seconds += sum_of_times(member)
    return seconds


def sum_of_times(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its ended children."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def other_cpu_fraction(times_of_ranks: Tensor, ranks_per_machine: int) -> float | None:
    """Return the share of a machine's CPU time that programs outside of the job used, from 0 to 1.

    With several machines, return the largest share of any of them. Return None if the job was too
    short to tell, or if the system does not count the times.

    Args:
        times_of_ranks: float64 [world_size, 4], the fields of each rank's `CpuTimes`. The ranks of
            one machine follow each other.
        ranks_per_machine: how many ranks each machine has.
    """
    shares = []
    for times_of_machine in times_of_ranks.split(ranks_per_machine):
        # The ranks of a machine read the same counters, at slightly different times, so their mean
        # counts. The last field, each rank's own time, adds up to the time of the job.
        elapsed, total, busy, _ = times_of_machine.mean(0).tolist()
        job_seconds = float(times_of_machine[:, 3].sum())
        if elapsed < MIN_SECONDS or total < MIN_SHARE * elapsed:
            return None
        shares.append(min(max((busy - job_seconds) / total, 0.0), 1.0))
    return max(shares)
