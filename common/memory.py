"""Memory that was really taken: on the device where there is one, of the process on a CPU."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import psutil
import torch

MEBIBYTE = 2**20
# Seconds between two looks at the process where the kernel's high-water mark can't be reset.
SAMPLE_SECONDS = 0.002
CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB; those of a GPU are peaks."""
    metrics = {"memory/host_rss_mib": resident_bytes() / MEBIBYTE}
    if device.type == "cuda":
        metrics["memory/peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / MEBIBYTE
        metrics["memory/peak_reserved_mib"] = torch.cuda.max_memory_reserved(device) / MEBIBYTE
        for name, earlier in MemoryTracker.earlier_peaks.get(str(device), {}).items():
            metrics[name] = max(metrics[name], earlier)
    return metrics


def memory_peaks(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics of the whole run, in MiB: peaks, all of them."""
    host = peak_memory_bytes(torch.device("cpu"))
    return memory_used(device) | {"memory/host_rss_mib": host / MEBIBYTE}


def device_memory(device: torch.device) -> int:
    """Return all memory of `device` in bytes; on a CPU, what the process's container may take."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def memory_now(device: torch.device) -> int:
    """Return the bytes in use: of the device's allocator, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes in use so far: of the device's allocator, or of the process."""
    used = memory_used(device)
    if device.type == "cuda":
        return int(used["memory/peak_allocated_mib"] * MEBIBYTE)
    return max(high_water_bytes() or 0, MemoryTracker.earlier_resident, resident_bytes())


def resident_bytes() -> int:
    """Return the bytes of this process that lie in memory."""
    return this_process().memory_info().rss


@functools.cache
def this_process() -> psutil.Process:
    """Return this process, found once: that takes longer than to ask it for its memory."""
    return psutil.Process()


def high_water_bytes() -> int | None:
    """Return the kernel's record of the most resident bytes; None where it keeps none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class MemoryTracker:
    """Measures the memory that a block of code takes.

    ``with MemoryTracker() as memory: ...``, and then, in MiB:

    - ``memory.peak_mib``: the most that was in use at any time in the block, all that was in use
      before it included;
    - ``memory.delta_mib``: how far that is above what was in use when the block began;
    - ``memory.kept_mib``: how much more is in use at the block's end than at its beginning.

    On CUDA these are the allocator's own figures, exact to its blocks of 512 bytes. On a CPU they
    are of the process (resident pages, those of mapped files too). Linux's high-water mark
    is reset at the block's beginning: no peak is missed, however short, and the figures are
    exact to some pages a thread. Where it can't be reset a thread looks every 2 ms
    (`SAMPLE_SECONDS`), and misses what is shorter; ``memory.method`` says which it was.

    Trackers may be nested, and leave the peaks that `memory_used` reports whole. They are for
    one thread at a time.
    """

    # What peaks had been before they were reset: of CUDA by device and metric in MiB, of the
    # process in bytes.
    earlier_peaks: ClassVar[dict[str, dict[str, float]]] = {}
    earlier_resident: ClassVar[int] = 0
    active: ClassVar[list[MemoryTracker]] = []

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Measure `device`; None for the current GPU, or the CPU where there is none."""
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.peak_mib = self.delta_mib = self.kept_mib = 0.0
        self.method = "allocator" if self.device.type == "cuda" else "high-water mark"
        self.peak = 0  # bytes
        self.sampler: threading.Thread | None = None
        self.ended = threading.Event()

    def __enter__(self) -> MemoryTracker:
        """Reset the peaks and begin."""
        for tracker in self.active:
            if tracker.device == self.device:
                tracker.note_peak()
        self.active.append(self)
        if self.device.type == "cuda":
            MemoryTracker.earlier_peaks[str(self.device)] = {
                name: value
                for name, value in memory_used(self.device).items()
                if name != "memory/host_rss_mib"
            }
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            MemoryTracker.earlier_resident = peak_memory_bytes(self.device)
            try:
                CLEAR_REFS.write_text("5")
            except OSError:
                self.method = f"samples every {1000 * SAMPLE_SECONDS:g} ms"
                self.sampler = threading.Thread(target=self.sample, daemon=True)
                self.sampler.start()
        self.peak = self.before = memory_now(self.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, and work out the figures."""
        after = memory_now(self.device)
        self.note_peak()
        self.active.remove(self)
        if self.sampler is not None:
            self.ended.set()
            self.sampler.join()
        self.peak_mib = max(self.peak, after) / MEBIBYTE
        self.delta_mib = self.peak_mib - self.before / MEBIBYTE
        self.kept_mib = (after - self.before) / MEBIBYTE

    def note_peak(self) -> None:
        """Keep the peak since the last reset, which is about to be lost."""
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
        elif self.sampler is None:
            self.peak = max(self.peak, high_water_bytes() or 0)

    def sample(self) -> None:
        """Look at the process again and again, until the block ends."""
        while not self.ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, resident_bytes())
