"""Torch's functions for one type of device, such as those of `torch.mps`; any may be missing."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

from common.system.devices.selection import indexed
from common.system.devices.trials import UNSUPPORTED_ERRORS

# A function of a backend's module. The type of its result is not known, because the backend may be
# from outside of torch.
BackendFunction = Callable[..., Any]
Result = TypeVar("Result")


def device_module(device: torch.device) -> ModuleType | None:
    """Return torch's module for a device's type, such as ``torch.mps``; None if there is none."""
    try:
        return torch.get_device_module(device)
    except UNSUPPORTED_ERRORS:
        return None


def optional_function(device: torch.device, *names: str) -> BackendFunction | None:
    """Return the first of these functions that the device's module has; None if it has none.

    Backends have different names for some functions.
    """
    module = device_module(device)
    for name in names:
        function = getattr(module, name, None)
        if callable(function):
            return function
    return None


def required_function(device: torch.device, name: str) -> BackendFunction:
    """Return a function of the device's module.

    Raises:
        AttributeError: the module does not have this function. A trial takes this error, which is
            among the `UNSUPPORTED_ERRORS`, for a missing capability.
    """
    return getattr(device_module(device), name)


def call_with_device(device: torch.device, *names: str) -> Any:
    """Call the first function of these names that the device's module has, with the device.

    The result is None if the module lacks these functions, or the device does not support the call.
    """
    function = optional_function(device, *names)
    if function is None:
        return None
    try:
        return function(device)
    except UNSUPPORTED_ERRORS:
        return None


def call_without_device(device: torch.device, name: str) -> Any:
    """Call a function of the device's module that takes no device, such as those of ``torch.mps``.

    The result is None if the device's module lacks the function, or does not support the call.
    """
    function = optional_function(device, name)
    if function is None:
        return None
    try:
        return function()
    except UNSUPPORTED_ERRORS:
        return None


def call_accelerator(
    function: Callable[[torch.device], Result], device: torch.device
) -> Result | None:
    """Call a function of ``torch.accelerator``; return None if the device does not support it."""
    try:
        return function(indexed(device))
    except UNSUPPORTED_ERRORS:
        return None


def is_current_type(device: torch.device) -> bool:
    """Whether `device` is of the one type that the functions of ``torch.accelerator`` serve.

    For a device of another type, those functions would answer about the wrong device.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def device_count(device: torch.device) -> int:
    """Return how many devices of this type there are; 1 if the backend has no such function."""
    count = optional_function(device, "device_count")
    return int(count()) if count is not None else 1
