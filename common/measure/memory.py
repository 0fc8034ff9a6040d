"""Memory that was really taken: on the device where there is one, of the process on a CPU."""

import re
import threading
from pathlib import Path
from typing import ClassVar, Self

import psutil
import torch

MEBIBYTE = 2**20
SAMPLE_SECONDS = 0.002
CLEAR_REFS = Path("/proc/self/clear_refs")
PROCESS = psutil.Process()  # takes longer to make than to ask for its memory
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB; those of a GPU are peaks."""
    names = ("memory/peak_allocated_mib", "memory/peak_reserved_mib")
    found = dict(zip(names, peaks(device), strict=True)) if device.type == "cuda" else {}
    found["memory/host_rss_mib"] = resident_bytes()
    return {name: size / MEBIBYTE for name, size in found.items()}


def device_memory(device: torch.device) -> int:
    """Return all memory of `device` in bytes; on a CPU, what the process's container may take."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [Path(path).read_text().strip() for path in LIMITS if Path(path).is_file()]
    total = psutil.virtual_memory().total
    return min([total, *(int(limit) for limit in limits if limit != "max")])


def memory_now(device: torch.device) -> int:
    """Return the bytes in use: of the device's allocator, or resident in the process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def peaks(device: torch.device) -> tuple[int, int]:
    """Return the most bytes in use so far (see `memory_now`), and reserved on a GPU."""
    now = since_reset(device)
    earlier = MemoryTracker.earlier.get(indexed(device), now)
    return max(now[0], earlier[0]), max(now[1], earlier[1])


def since_reset(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    path = Path("/proc/self/status")  # Linux keeps a high-water mark
    marks = re.findall(r"VmHWM:\s+(\d+) kB", path.read_text() if path.exists() else "")
    return max([resident_bytes(), *(1024 * int(mark) for mark in marks)]), 0


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
    process's resident pages, by Linux's high-water mark or, where that can't be reset, a thread
    (``method``). Trackers may be nested, in one thread; `memory_used` still reports whole peaks.
    """

    earlier: ClassVar[dict[torch.device, tuple[int, int]]] = {}  # peaks before the last reset
    active: ClassVar[list["MemoryTracker"]] = []

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Measure `device`; None for the current GPU, or the CPU where there is none."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = indexed(torch.device(device))
        self.peak_mib = self.delta_mib = self.kept_mib = 0.0
        self.method = "allocator" if self.device.type == "cuda" else "high-water mark"
        self.sampler: threading.Thread | None = None
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        for tracker in self.active:
            if tracker.device == self.device:
                tracker.note_peak()
        self.active.append(self)
        self.earlier[self.device] = peaks(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                CLEAR_REFS.write_text("5")
            except OSError:
                self.method = f"samples every {1000 * SAMPLE_SECONDS:g} ms"
                self.sampler = threading.Thread(target=self.sample, daemon=True)
        self.peak = self.before = memory_now(self.device)  # bytes
        if self.sampler is not None:
            self.sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
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
        if self.sampler is None:
            self.peak = max(self.peak, since_reset(self.device)[0])

    def sample(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, resident_bytes())
