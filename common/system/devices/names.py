"""The name of a device's hardware."""

import torch

from common.system.devices.backend import call_with_device
from common.system.devices.selection import is_accelerator
from common.system.platforms.limits import usable_cores
from common.system.processor import processor_name


def device_name(device: torch.device) -> str:
    """Return the name of the hardware, such as "NVIDIA H100 80GB HBM3".

    An accelerator that does not report a name is called by its type and the machine's processor.
    """
    if not is_accelerator(device):
        return f"{processor_name()}, {usable_cores()} cores"
    name = call_with_device(device, "get_device_name", "get_name")
    return str(name) if name else f"{device.type} of {processor_name()}"
