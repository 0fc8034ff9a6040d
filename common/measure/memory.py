"""Memory that was really taken: on the device where there is one, of the process on a CPU."""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil
import torch

MEBIBYTE = 2**20
CLEAR_REFS = Path("/proc/self/clear_refs")
PROCESS = psutil.Process()  # takes longer to make than to ask for its memory
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# Peaks before the last reset: of the whole process, and of each `MemoryTracker` that is open.
EARLIER: defaultdict[torch.device, list[tuple[int, int]]] = defaultdict(lambda: [(0, 0)])


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB; those of a GPU are peaks."""
    names = ("memory/peak_allocated_mib", "memory/peak_reserved_mib")
    found = dict(zip(names, peaks(device), strict=True)) if device.type == "cuda" else {}
    found["memory/host_rss_mib"] = resident_bytes()
    return {name: size / MEBIBYTE for name, size in found.items()}


def peak_memory(figures: Mapping[str, float]) -> float:
    """Return the peak memory to show, in MiB: the device's, or the host's on a CPU."""
    return figures.get("memory/peak_allocated_mib") or figures["memory/host_rss_mib"]


def device_memory(device: torch.device) -> int:
    """Return all memory of `device` in bytes; on a CPU, what the process's container may take."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [Path(path).read_text().strip() for path in LIMITS if Path(path).is_file()]
    total = psutil.virtual_memory().total
    return min([total, *(int(limit) for limit in limits if limit != "max")])


def limit_memory() -> None:
    """Have what goes beyond all memory fail where it is asked for: Linux would kill the process."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        # The program's own data are for the most part never touched: threads' stacks.
        limit = PROCESS.memory_info().data + device_memory(torch.device("cpu"))
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
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def peaks(device: torch.device) -> tuple[int, int]:
    """Return the most bytes in use so far (see `memory_now`), and reserved on a GPU."""
    return higher(EARLIER[indexed(device)][0], since_reset(device))


def since_reset(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    path = Path("/proc/self/status")  # Linux keeps a high-water mark
    marks = re.findall(r"VmHWM:\s+(\d+) kB", path.read_text() if path.exists() else "")
    return max([resident_bytes(), *(1024 * int(mark) for mark in marks)]), 0


def forget_peaks(device: torch.device) -> None:
    """Count peaks from now on, outside of any `MemoryTracker`."""
    with MemoryTracker(device):  # which resets the system's
        pass
    EARLIER[indexed(device)] = [(0, 0)]


def higher(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


def indexed(device: torch.device) -> torch.device:
    """Return `device` by its number: ``cuda`` and ``cuda:0`` are one GPU, and unequal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def resident_bytes() -> int:
    return PROCESS.memory_info().rss


class MemoryTracker:
    """Measures the memory that a block of code takes: ``with MemoryTracker() as memory: ...``.

    In MiB, ``memory.peak_mib`` is then the most that was in use in the block, ``delta_mib`` how
    far that is above its beginning, ``kept_mib`` how far its end is: of CUDA's allocator, or of the
    process's resident pages. Trackers may be nested, in one thread. Where the system keeps no mark
    of a process's peak that can be reset, only a peak above all earlier ones is seen.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Measure `device`; None for the current GPU, or the CPU where there is none."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = indexed(torch.device(device))
        self.peak_mib = self.delta_mib = self.kept_mib = 0.0

    def __enter__(self) -> Self:
        self.around, self.is_reset = since_reset(self.device), True
        earlier = EARLIER[self.device]
        earlier[:] = [*(higher(peak, self.around) for peak in earlier), (0, 0)]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
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
