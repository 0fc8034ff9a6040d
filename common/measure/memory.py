"""Measures memory in use: of the device if it reports it, otherwise of the process."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple, Self

import torch

from common.measure.process_memory import process_peak, reset_process_peak, resident_bytes
from common.metric_names import ALLOCATED, HOST_MEMORY, PEAK_ALLOCATED, PEAK_RESERVED
from common.system import devices
from common.system.allocator import HEAP

MEBIBYTE = 2**20


class Peaks(NamedTuple):
    """The most bytes at any time; 0 if unknown."""

    in_use: int
    reserved: int  # by the device's allocator

    def or_higher(self, other: "Peaks") -> "Peaks":
        """Return the higher of the two numbers in use, and the higher of the two reserved."""
        return Peaks(max(self.in_use, other.in_use), max(self.reserved, other.reserved))


NO_PEAKS = Peaks(in_use=0, reserved=0)
# The peaks before the system's marks were last reset: first the peaks of the whole process, then
# those of each open `MemoryTracker`. Each tracker resets the marks, so the earlier peaks are kept
# here.
EARLIER_PEAKS: defaultdict[torch.device, list[Peaks]] = defaultdict(lambda: [NO_PEAKS])


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB.

    ``memory/host_rss_mib`` is the process's resident memory now. A device that keeps peaks adds
    ``memory/peak_allocated_mib`` and ``memory/peak_reserved_mib``. A device that only reports the
    memory in use now adds ``memory/allocated_mib``. Other devices add nothing.
    """
    sizes: dict[str, int] = {}
    allocated = devices.allocated_bytes(device)
    if devices.keeps_peaks(device):
        highest = peaks(device)
        sizes[PEAK_ALLOCATED] = highest.in_use
        sizes[PEAK_RESERVED] = highest.reserved
    elif allocated is not None:
        sizes[ALLOCATED] = allocated
    sizes[HOST_MEMORY] = resident_bytes()
    return {name: size / MEBIBYTE for name, size in sizes.items()}


def peak_memory(figures: Mapping[str, float]) -> float:
    """Return the memory to show as the peak, in MiB, from the metrics of `memory_used`.

    It is the device's peak if the device keeps one, and otherwise the process's resident memory.
    """
    return figures.get(PEAK_ALLOCATED) or figures[HOST_MEMORY]


def memory_now(device: torch.device) -> int:
    """Return the bytes in use now, by the device's allocator or resident in the process."""
    allocated = devices.allocated_bytes(device)
    return resident_bytes() if allocated is None else allocated


def peaks(device: torch.device) -> Peaks:
    """Return the most bytes in use so far (see `memory_now`), and the most reserved on a GPU.

    For a device that keeps no peaks, return the memory in use now.
    """
    peaks_of_process = EARLIER_PEAKS[devices.indexed(device)][0]
    return peaks_of_process.or_higher(since_reset(device))


def since_reset(device: torch.device) -> Peaks:
    """Return the peaks since the marks of the device or the system were last reset.

    For a device that reports its memory but keeps no peaks, return the memory in use now.
    """
    device_peaks = devices.peak_bytes(device)
    if device_peaks is not None:
        in_use, reserved = device_peaks
        return Peaks(in_use, reserved)
    allocated = devices.allocated_bytes(device)
    if allocated is None:
        return Peaks(in_use=process_peak(), reserved=0)
    return Peaks(in_use=allocated, reserved=0)


def forget_peaks(device: torch.device) -> None:
    """Forget all peaks until now; call it outside of any `MemoryTracker`.

    Trials of batch sizes call this at their end, because a run reports the peaks of its training.
    """
    with MemoryTracker(device):  # this resets the marks
        pass
    EARLIER_PEAKS[devices.indexed(device)] = [NO_PEAKS]


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
        self.outer_peaks = NO_PEAKS  # the peaks from the last reset until the block
        self.is_reset = False  # whether the marks were reset at the beginning of the block

    def __enter__(self) -> Self:
        self.outer_peaks = since_reset(self.device)
        # The reset below loses these peaks. So `EARLIER_PEAKS` keeps them, for the process as a
        # whole and for the trackers around this one.
        earlier = EARLIER_PEAKS[self.device]
        earlier[:] = [peaks_before.or_higher(self.outer_peaks) for peaks_before in earlier]
        earlier.append(NO_PEAKS)
        if devices.has_own_memory_figures(self.device):
            self.is_reset = devices.reset_peaks(self.device)
        else:
            HEAP.trim()  # memory that was kept would not count as taken
            self.is_reset = reset_process_peak()
        self.bytes_before = memory_now(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        after = memory_now(self.device)
        peaks_of_block = EARLIER_PEAKS[self.device].pop()
        highest = peaks_of_block.or_higher(since_reset(self.device)).in_use
        # If the marks could not be reset, a peak that is not higher than before may be an old one,
        # so it does not count.
        if not self.is_reset and highest <= self.outer_peaks.in_use:
            highest = 0
        peak = max(self.bytes_before, after, highest)
        self.peak_mib = peak / MEBIBYTE
        self.delta_mib = (peak - self.bytes_before) / MEBIBYTE
        self.kept_mib = (after - self.bytes_before) / MEBIBYTE
