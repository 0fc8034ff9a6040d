"""Which device this process computes on."""

import os

import torch

from common.system.devices.trials import UNSUPPORTED_ERRORS
from common.system.launch_variables import TRUE_WORDS

# A variable that users may set, and that `accelerate launch` sets to a word for yes or no.
USE_CPU_VARIABLE = "ACCELERATE_USE_CPU"


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` is a GPU or another accelerator, even one that shares the CPU's memory.

    The meta device does not count as one, because it does not compute.
    """
    return device.type not in ("cpu", "meta")


def is_cpu_asked_for() -> bool:
    """Whether the environment or the launcher asks for the CPU although there is an accelerator."""
    return os.environ.get(USE_CPU_VARIABLE, "").lower() in TRUE_WORDS


def default_device() -> torch.device:
    """Return the accelerator of this process, with its index.

    Return the CPU if there is no accelerator, or if the CPU is asked for.
    """
    if is_cpu_asked_for():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return indexed(accelerator)


def indexed(device: torch.device) -> torch.device:
    """Return `device` with its index, because ``mps`` and ``mps:0`` compare unequal."""
    if not is_accelerator(device) or device.index is not None:
        return device
    try:
        return torch.device(device.type, torch.accelerator.current_device_index())
    except UNSUPPORTED_ERRORS:
        return torch.device(device.type, 0)
