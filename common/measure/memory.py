"""Measures memory in use: of the device if it reports it, otherwise of the process."""

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import psutil
import torch

from common.metric_names import ALLOCATED, HOST_MEMORY, PEAK_ALLOCATED, PEAK_RESERVED
from common.system import devices
from common.system.allocator import HEAP
from common.system.platforms.limits import can_limit_own_memory, resource

MEBIBYTE = 2**20
CLEAR_REFS = Path("/proc/self/clear_refs")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# The most bytes in use, and the most bytes reserved by the device's allocator; 0 if unknown.
Peaks = tuple[int, int]
# The peaks before the system's marks were last reset: first the peaks of the whole process, then
# those of each open `MemoryTracker`. Each tracker resets the marks, so the earlier peaks are kept
# here.
EARLIER_PEAKS: defaultdict[torch.device, list[Peaks]] = defaultdict(lambda: [(0, 0)])


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB.

    ``memory/host_rss_mib`` is the process's resident memory now. A device that keeps peaks adds
    ``memory/peak_allocated_mib`` and ``memory/peak_reserved_mib``. A device that only reports the
    memory in use now adds ``memory/allocated_mib``. Other devices add nothing.
    """
    sizes: dict[str, int] = {}
    allocated = devices.allocated_bytes(device)
    if devices.keeps_peaks(device):
        peak_allocated, peak_reserved = peaks(device)
        sizes[PEAK_ALLOCATED] = peak_allocated
        sizes[PEAK_RESERVED] = peak_reserved
    elif allocated is not None:
        sizes[ALLOCATED] = allocated
    sizes[HOST_MEMORY] = resident_bytes()
    return {name: size / MEBIBYTE for name, size in sizes.items()}


def peak_memory(figures: Mapping[str, float]) -> float:
    """Return the memory to show as the peak, in MiB, from the metrics of `memory_used`.

    It is the device's peak if the device keeps one, and otherwise the process's resident memory.
    """
    return figures.get(PEAK_ALLOCATED) or figures[HOST_MEMORY]


def device_memory(device: torch.device) -> int:
    """Return the size of a device's memory in bytes.

    For a CPU, and for a device that doesn't report its memory, return the memory of the machine or
    the limit of the process's container, whichever is smaller.
    """
    room = devices.memory_room(device)
    if room is not None:
        return room.total
    return min([total_memory(), *container_limits()])


def total_memory() -> int:
    """Return the bytes of memory that the machine has."""
    try:
        return psutil.virtual_memory().total
    except (OSError, psutil.Error):  # without /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_limits() -> list[int]:
    """Return the memory limits in bytes of the Linux control groups that this process is in.

    Slurm, systemd and container engines nest control groups, and each level may have a limit.
    """
    limits = []
    for root, path, name in own_cgroups():
        # A path begins with "/", so its first part is empty. In a container, ".." may follow: it
        # stands for levels above the container's root, which can't be read.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            try:
                limits.append(int(root.joinpath(*parts[:depth], name).read_text(encoding="utf-8")))
            except (OSError, ValueError):  # the level is hidden, or its limit is "max"
                continue
    return limits


def own_cgroups() -> Iterator[tuple[Path, str, str]]:
    """Yield the control groups of this process.

    Yields:
        The folder where groups are mounted, the path of this process's group below it, and the name
        of the file with a group's memory limit.
    """
    try:
        lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        # Without /proc, the groups at the root of both versions are the only ones known.
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        # A line is ID:CONTROLLERS:PATH. Only version 2 has no controllers there.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield CGROUPS, path, "memory.max"
            yield CGROUPS / "unified", path, "memory.max"  # if version 1 is mounted as well
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory", path, "memory.limit_in_bytes"


def limit_memory() -> None:
    """Limit this process to the memory that exists, on Linux.

    An allocation beyond that fails with an error, which a message can explain. Without the limit,
    Linux would kill the process.
    """
    if can_limit_own_memory() and resource is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        # The size of the process's current data is added, because most of these data are stacks of
        # threads, which are never touched and take no memory.
        limit = own_data_bytes() + device_memory(torch.device("cpu"))
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def lift_limit() -> None:
    """Undo `limit_memory`, so that a run that met the limit can still write its files and end."""
    if can_limit_own_memory() and resource is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))


def memory_now(device: torch.device) -> int:
    """Return the bytes in use now, by the device's allocator or resident in the process."""
    allocated = devices.allocated_bytes(device)
    return resident_bytes() if allocated is None else allocated


def peaks(device: torch.device) -> Peaks:
    """Return the most bytes in use so far (see `memory_now`), and the most reserved on a GPU.

    For a device that keeps no peaks, return the memory in use now.
    """
    return higher(EARLIER_PEAKS[devices.indexed(device)][0], since_reset(device))


def since_reset(device: torch.device) -> Peaks:
    """Return the peaks since the marks of the device or the system were last reset.

    For a device that reports its memory but keeps no peaks, return the memory in use now.
    """
    device_peaks = devices.peak_bytes(device)
    if device_peaks is not None:
        return device_peaks
    allocated = devices.allocated_bytes(device)
    return process_peak() if allocated is None else (allocated, 0)


def process_peak() -> Peaks:
    """Return the most bytes resident in the process since the mark was last reset.

    Linux keeps such a mark. On other systems, return what `resident_bytes` knows. The second of the
    two numbers, the bytes reserved, is always 0.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        status = ""
    marks = [1024 * int(kib) for kib in re.findall(r"VmHWM:\s+(\d+) kB", status)]
    peak = max([resident_bytes(), *marks])
    return peak, 0


def forget_peaks(device: torch.device) -> None:
    """Forget all peaks until now; call it outside of any `MemoryTracker`.

    Trials of batch sizes call this at their end, because a run reports the peaks of its training.
    """
    with MemoryTracker(device):  # this resets the marks
        pass
    EARLIER_PEAKS[devices.indexed(device)] = [(0, 0)]


def higher(left: Peaks, right: Peaks) -> Peaks:
    """Return the higher of the two numbers of bytes in use, and of the two numbers reserved."""
    return max(left[0], right[0]), max(left[1], right[1])


@functools.cache
def own_process() -> psutil.Process | None:
    """Return psutil's object for this process, made only once; None without /proc."""
    try:
        return psutil.Process()
    except (OSError, psutil.Error):
        return None


def own_data_bytes() -> int:
    """Return the bytes of this process's data, including pages never touched; 0 if unknown."""
    process = own_process()
    return 0 if process is None else process.memory_info().data


def resident_bytes() -> int:
    """Return the bytes of the process's resident memory now; 0 if the system does not tell."""
    process = own_process()
    if process is not None:
        return process.memory_info().rss
    if resource is None:
        return 0
    # Without /proc only the peak is known, which takes the place of the current value.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the peak, in KiB


class MemoryTracker:
    """Measures the memory that a block of code takes: ``with MemoryTracker() as memory: ...``.

    After the block, it has these figures, in MiB of the device's allocator or of the process's
    resident memory:

    - ``peak_mib`` is the most that was in use in the block.
    - ``delta_mib`` is the difference between that peak and the beginning of the block.
    - ``kept_mib`` is the difference between the end and the beginning of the block.

    Trackers may be nested, in one thread. If the device or system keeps no peak that can be reset,
    a peak in the block is only seen if it is above all earlier peaks.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Measure a device; None measures the current accelerator, or the CPU without one."""
        chosen = devices.default_device() if device is None else torch.device(device)
        self.device = devices.indexed(chosen)
        self.peak_mib = 0.0
        self.delta_mib = 0.0
        self.kept_mib = 0.0
        self.bytes_before = 0  # bytes in use at the beginning of the block
        self.outer_peaks: Peaks = (0, 0)  # the peaks from the last reset until the block
        self.is_reset = False  # whether the marks were reset at the beginning of the block

    def __enter__(self) -> Self:
        self.outer_peaks = since_reset(self.device)
        self.is_reset = True
        # The reset below loses these peaks. So `EARLIER_PEAKS` keeps them, for the process as a
        # whole and for the trackers around this one.
        earlier = EARLIER_PEAKS[self.device]
        earlier[:] = [higher(peak, self.outer_peaks) for peak in earlier]
        earlier.append((0, 0))
        if devices.has_own_memory_figures(self.device):
            self.is_reset = devices.reset_peaks(self.device)
        else:
            HEAP.trim()  # memory that was kept would not count as taken
            try:
                # This resets Linux's high-water mark of the process; see `man 5 proc`.
                CLEAR_REFS.write_text("5", encoding="utf-8")
            except OSError:
                self.is_reset = False
        self.bytes_before = memory_now(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        after = memory_now(self.device)
        highest, _ = higher(EARLIER_PEAKS[self.device].pop(), since_reset(self.device))
        # If the marks could not be reset, a peak that is not higher than before may be an old one,
        # so it does not count.
        is_of_this_block = self.is_reset or highest > self.outer_peaks[0]
        peak = max(self.bytes_before, after, highest if is_of_this_block else 0)
        self.peak_mib = peak / MEBIBYTE
        self.delta_mib = (peak - self.bytes_before) / MEBIBYTE
        self.kept_mib = (after - self.bytes_before) / MEBIBYTE
