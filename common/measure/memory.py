"""Memory that was really taken: on the device where it says so, of the process elsewhere."""

import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import psutil
import torch

from common import devices

MEBIBYTE = 2**20
CLEAR_REFS = Path("/proc/self/clear_refs")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# Peaks before the last reset: of the whole process, and of each `MemoryTracker` that is open.
EARLIER: defaultdict[torch.device, list[tuple[int, int]]] = defaultdict(lambda: [(0, 0)])


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB.

    Those of a device are peaks. A device that keeps no peaks has ``memory/allocated_mib`` instead,
    what is in use now, and one that says nothing has none.
    """
    sizes: dict[str, int] = {}
    allocated = devices.allocated_bytes(device)
    if devices.keeps_peaks(device):
        sizes["memory/peak_allocated_mib"], sizes["memory/peak_reserved_mib"] = peaks(device)
    elif allocated is not None:
        sizes["memory/allocated_mib"] = allocated
    sizes["memory/host_rss_mib"] = resident_bytes()
    return {name: size / MEBIBYTE for name, size in sizes.items()}


def peak_memory(figures: Mapping[str, float]) -> float:
    """Return the peak memory to show, in MiB: the device's if it keeps one, or the host's."""
    return figures.get("memory/peak_allocated_mib") or figures["memory/host_rss_mib"]


def device_memory(device: torch.device) -> int:
    """Return all memory of `device` in bytes.

    On a CPU, and for a device that doesn't say, it is what the process's container may take.
    """
    room = devices.memory_room(device)
    if room is not None:
        return room[1]
    return min([total_memory(), *container_limits()])


def total_memory() -> int:
    """Return the bytes of memory that the machine has."""
    try:
        return psutil.virtual_memory().total
    except (OSError, psutil.Error):  # without /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_limits() -> list[int]:
    """Return the limits of memory in bytes of this process's control groups, all levels of them.

    Slurm, systemd and container engines nest control groups: each level has a limit of its own.
    """
    limits = []
    for root, path, name in own_cgroups():
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            try:
                limits.append(int(root.joinpath(*parts[:depth], name).read_text()))
            except (OSError, ValueError):  # no such level in this container, or "max": no limit
                continue
    return limits


def own_cgroups() -> Iterator[tuple[Path, str, str]]:
    """Yield (where they are mounted, path of this process's own, name of the file of its limit)."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield CGROUPS, path, "memory.max"
            yield CGROUPS / "unified", path, "memory.max"  # beside those of version 1
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory", path, "memory.limit_in_bytes"


def limit_memory() -> None:
    """Have what goes beyond all memory fail where it is asked for: Linux would kill the process."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        # The program's own data are for the most part never touched: threads' stacks.
        limit = own_data_bytes() + device_memory(torch.device("cpu"))
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def lift_limit() -> None:
    """Take back what `limit_memory` set, for what is still to do where it was met."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def memory_now(device: torch.device) -> int:
    """Return the bytes in use: of the device's allocator, or resident in the process."""
    allocated = devices.allocated_bytes(device)
    return resident_bytes() if allocated is None else allocated


def peaks(device: torch.device) -> tuple[int, int]:
    """Return the most bytes in use so far (see `memory_now`), and reserved on a GPU.

    Of a device that keeps no peaks, it is what is in use now.
    """
    return higher(EARLIER[devices.indexed(device)][0], since_reset(device))


def since_reset(device: torch.device) -> tuple[int, int]:
    device_peaks = devices.peak_bytes(device)
    if device_peaks is not None:
        return device_peaks
    allocated = devices.allocated_bytes(device)
    return process_peak() if allocated is None else (allocated, 0)


def process_peak() -> tuple[int, int]:
    """Return the most bytes that the process had since the mark was last reset, and 0."""
    try:
        status = Path("/proc/self/status").read_text()  # Linux keeps a high-water mark
    except OSError:
        status = ""
    marks = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return max([resident_bytes(), *(1024 * int(mark) for mark in marks)]), 0


def forget_peaks(device: torch.device) -> None:
    """Count peaks from now on, outside of any `MemoryTracker`."""
    with MemoryTracker(device):  # which resets the system's
        pass
    EARLIER[devices.indexed(device)] = [(0, 0)]


def higher(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


@functools.cache
def own_process() -> psutil.Process | None:
    """Return this process, which takes longer to make than to ask; None without /proc."""
    try:
        return psutil.Process()
    except (OSError, psutil.Error):
        return None


def own_data_bytes() -> int:
    """Return the bytes of this process's data, with those that were never touched."""
    process = own_process()
    return 0 if process is None else process.memory_info().data


def resident_bytes() -> int:
    process = own_process()
    if process is not None:
        return process.memory_info().rss
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the peak, in KiB


class MemoryTracker:
    """Measures the memory that a block of code takes: ``with MemoryTracker() as memory: ...``.

    In MiB, ``memory.peak_mib`` is then the most that was in use in the block, ``delta_mib`` how
    far that is above its beginning, ``kept_mib`` how far its end is: of the device's allocator, or
    of the process's resident pages. Trackers may be nested, in one thread. Where the device or the
    system keeps no mark of a peak that can be reset, only a peak above all earlier ones is seen.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Measure `device`; None for the current accelerator, or the CPU where there is none."""
        chosen = devices.default_device() if device is None else torch.device(device)
        self.device = devices.indexed(chosen)
        self.peak_mib = self.delta_mib = self.kept_mib = 0.0

    def __enter__(self) -> Self:
        self.around, self.is_reset = since_reset(self.device), True
        earlier = EARLIER[self.device]
        earlier[:] = [*(higher(peak, self.around) for peak in earlier), (0, 0)]
        if devices.has_own_memory_figures(self.device):
            self.is_reset = devices.reset_peaks(self.device)
        else:
            try:
                CLEAR_REFS.write_text("5")
            except OSError:
                self.is_reset = False
        self.before = memory_now(self.device)  # bytes
        return self

    def __exit__(self, *error: object) -> None:
        after = memory_now(self.device)
        highest, _ = higher(EARLIER[self.device].pop(), since_reset(self.device))
        is_known = self.is_reset or highest > self.around[0]
        peak = max(self.before, after, highest if is_known else 0)
        self.peak_mib = peak / MEBIBYTE
        self.delta_mib = (peak - self.before) / MEBIBYTE
        self.kept_mib = (after - self.before) / MEBIBYTE
