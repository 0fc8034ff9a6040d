"""The generator of random numbers of a device: its seed and its state."""

import torch

from common.system.devices.backend import optional_function, required_function
from common.system.devices.current import current_device
from common.system.devices.selection import is_accelerator
from common.system.devices.trials import UNSUPPORTED_ERRORS, tried_once


@tried_once
def has_generator(device: torch.device) -> bool:
    """Whether `device` has a generator of its own whose state can be saved and restored.

    The result is false for a CPU. Its generator is torch's default one, which `RandomState` saves.
    """
    if not is_accelerator(device):
        return False
    try:
        state = required_function(device, "get_rng_state")(device)
        required_function(device, "set_rng_state")(state, device)
    except UNSUPPORTED_ERRORS:
        return False
    return True


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's generator, uint8 on the host; None without a generator."""
    if not has_generator(device):
        return None
    return required_function(device, "get_rng_state")(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore what `generator_state` returned, on a device that `has_generator`."""
    required_function(device, "set_rng_state")(state, device)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator of this device alone, if it has one."""
    if not is_accelerator(device):
        return
    manual_seed = optional_function(device, "manual_seed", "manual_seed_all")
    if manual_seed is not None:
        with current_device(device):
            manual_seed(seed)
