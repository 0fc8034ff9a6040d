"""Copies from the host's memory to a device."""

import torch

from common.system.devices.streams import has_streams
from common.system.devices.trials import UNSUPPORTED_ERRORS, tried_once


@tried_once
def has_pinned_memory(device: torch.device) -> bool:
    """Whether host memory can be pinned, so that the host need not wait for copies to `device`.

    Without pinning, a copy with ``non_blocking=True`` may read memory that has changed since. A
    device without streams of its own, such as Apple's, counts as lacking it: its host allocator may
    reuse pinned memory before a copy has read it.
    """
    if not has_streams(device):
        return False
    try:
        pinned = torch.ones(2).pin_memory()
        if not pinned.is_pinned() or pinned.device.type != "cpu":
            return False
        copied = pinned.to(device, non_blocking=True)
        return float(copied.sum()) == 2.0
    except UNSUPPORTED_ERRORS:
        return False


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to `device`; if the device allows it, the host does not wait."""
    if not has_pinned_memory(device):
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
