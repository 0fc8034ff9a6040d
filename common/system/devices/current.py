"""Makes a device the current one of its type, where there are several."""

from contextlib import AbstractContextManager, nullcontext

import torch

from common.system.devices.backend import device_count
from common.system.devices.selection import indexed, is_accelerator


def use(device: torch.device) -> None:
    """Make `device` this thread's current device, if there are several of its type.

    Each new thread begins with the first device as its current one, so it needs this call.
    """
    if is_accelerator(device) and device_count(device) > 1:
        torch.accelerator.set_device_index(indexed(device))


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current device of its type.

    It is for functions of a backend that take no device, and act on the current one.
    """
    if is_accelerator(device) and device_count(device) > 1:
        return torch.accelerator.device_index(indexed(device).index)
    return nullcontext()
