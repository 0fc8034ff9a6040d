"""Pinned memory of the host, for variants of the simulated device that have it.

torch takes the allocator of pinned memory from C++ alone. Here ordinary memory counts as pinned,
and Python's ways to ask for pinned memory are replaced.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

ADDRESSES: set[int] = set()  # of pinned storages that live


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Let the memory of a new tensor count as pinned."""
    storage = tensor.untyped_storage()
    ADDRESSES.add(storage.data_ptr())
    weakref.finalize(storage, ADDRESSES.discard, storage.data_ptr()).atexit = False
    return tensor


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether a tensor lies in pinned memory."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in ADDRESSES


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a copy in pinned memory, or the tensor if it lies there."""
    return tensor if is_pinned(tensor) else mark(tensor.detach().clone())


def install() -> None:
    """Replace torch's functions."""
    tensor_type: Any = torch.Tensor
    tensor_type.pin_memory = pin_memory
    tensor_type.is_pinned = is_pinned
    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, making_pinned(getattr(torch, name)))


def making_pinned(function: Any) -> Any:
    """Return a function that makes tensors, in pinned memory if the call asks for it."""

    def make(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = function(*arguments, **options)
        return mark(tensor) if pin_memory else tensor

    return make
