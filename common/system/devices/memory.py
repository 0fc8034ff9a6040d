"""The memory of a device: its size, the bytes in use, the peaks, and the allocator's cache."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from common.system.devices.backend import (
    call_accelerator,
    call_with_device,
    call_without_device,
    is_current_type,
    optional_function,
)
from common.system.devices.selection import indexed, is_accelerator
from common.system.devices.trials import UNSUPPORTED_ERRORS


def has_own_memory_figures(device: torch.device) -> bool:
    """Whether `device` reports how much of its memory tensors take.

    The CPU does not. For such a device, the memory of the process is measured instead.
    """
    return allocated_bytes(device) is not None


def keeps_peaks(device: torch.device) -> bool:
    """Whether `device` records the highest number of bytes that tensors took."""
    return peak_bytes(device) is not None


class MemoryInfo(NamedTuple):
    """The bytes of a device's memory."""

    free: int
    total: int


def memory_info(device: torch.device) -> MemoryInfo | None:
    """Return the free and the total bytes of the memory of `device`.

    The result is None for a CPU, and for a device that does not report them.
    """
    if not is_accelerator(device):
        return None
    # Ask the backend's own function first, then torch's general function.
    free_and_total = call_with_device(device, "mem_get_info")
    if free_and_total is None and is_current_type(device):
        free_and_total = call_accelerator(torch.accelerator.get_memory_info, device)
    if free_and_total is not None:
        free, total = free_and_total
        return MemoryInfo(int(free), int(total))
    # Apple's GPUs have these two functions.
    recommended = call_without_device(device, "recommended_max_memory")
    in_use = call_without_device(device, "driver_allocated_memory")
    if recommended is None or in_use is None:
        return None
    return MemoryInfo(max(0, int(recommended) - int(in_use)), int(recommended))


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors on `device` take; None if the device does not report them."""
    if not is_accelerator(device):
        return None
    # Ask the function of most backends, that of Apple's GPUs, and torch's general function.
    size = call_with_device(device, "memory_allocated")
    if size is None:
        size = call_without_device(device, "current_allocated_memory")
    if size is None:
        size = memory_stats(device).get("allocated_bytes.all.current")
    return None if size is None else int(size)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the most bytes allocated and reserved since `reset_peaks`; None if not recorded.

    The reserved bytes are 0 if the device does not report them.
    """
    if not is_accelerator(device):
        return None
    allocated = call_with_device(device, "max_memory_allocated")
    reserved = call_with_device(device, "max_memory_reserved")
    if allocated is None:
        stats = memory_stats(device)
        allocated = stats.get("allocated_bytes.all.peak")
        reserved = stats.get("reserved_bytes.all.peak")
    return None if allocated is None else (int(allocated), int(reserved or 0))


def reset_peaks(device: torch.device) -> bool:
    """Reset the recorded peaks; return whether `device` did so."""
    if not is_accelerator(device):
        return False
    reset = optional_function(device, "reset_peak_memory_stats")
    try:
        if reset is not None:
            reset(device)
        elif memory_stats(device):
            torch.accelerator.reset_peak_memory_stats(indexed(device))
        else:
            return False
    except UNSUPPORTED_ERRORS:
        return False
    return True


def empty_cache(device: torch.device) -> None:
    """Return memory that the device's allocator keeps, and no tensor uses, to the system."""
    if not is_accelerator(device):
        return
    empty = optional_function(device, "empty_cache")
    if empty is not None:
        empty()
    elif is_current_type(device):
        call_accelerator(lambda _: torch.accelerator.empty_cache(), device)


def memory_stats(device: torch.device) -> Mapping[str, int]:
    """Return torch's own statistics of the device's allocator; empty without statistics."""
    if not is_current_type(device):
        return {}
    return call_accelerator(torch.accelerator.memory_stats, device) or {}
