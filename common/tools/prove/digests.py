"""Short digests of tensors and other values, by which two runs are compared bit for bit."""

import hashlib
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from common.checkpoints.kinds import RandomState
from common.checkpoints.shards import is_sharded, local

DIGITS = 16  # of a digest, in hexadecimal
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest_of_state(value: object) -> str:
    """Return a digest of a value: a tensor, an array, a plain value, or a nest of these.

    The order of mappings and sets does not matter. Of any other object, only the type counts.
    """
    hasher = hashlib.sha256()
    feed(hasher, value)
    return hasher.hexdigest()[:DIGITS]


def feed(hasher: Any, value: object) -> None:
    """Add a value to a hash object of `hashlib`."""
    if isinstance(value, torch.Tensor):
        feed_tensor(hasher, value)
    elif isinstance(value, np.ndarray):
        feed_array(hasher, value)
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=sorting_key):
            feed(hasher, key)
            feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"sequence {len(value)}".encode())
        for item in value:
            feed(hasher, item)
    elif isinstance(value, (set, frozenset)):
        hasher.update(f"set {len(value)}".encode())
        for item in sorted(value, key=sorting_key):
            feed(hasher, item)
    elif isinstance(value, (*PLAIN, Enum, PurePath, torch.dtype, torch.device, torch.Size)):
        hasher.update(f"{type(value).__name__} {value!r};".encode())
    else:
        hasher.update(f"{type(value).__qualname__};".encode())


def sorting_key(key: object) -> tuple[str, str]:
    return type(key).__name__, repr(key)


def feed_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    """Add a tensor's dtype, shape and bytes; of a sharded tensor, this rank's rows."""
    values = tensor.detach()
    if is_sharded(values):
        values = local(values)
    hasher.update(f"{values.dtype} {tuple(values.shape)};".encode())
    if values.device.type == "meta" or values.layout != torch.strided or values.is_quantized:
        return
    on_host = values.cpu().contiguous().reshape(-1)
    hasher.update(on_host.view(torch.uint8).numpy().data)


def feed_array(hasher: Any, array: np.ndarray) -> None:
    """Add an array's dtype, shape and bytes; of an array of objects, the objects."""
    hasher.update(f"{array.dtype} {array.shape};".encode())
    if array.dtype == object:
        feed(hasher, array.tolist())
    else:
        hasher.update(np.ascontiguousarray(array).tobytes())


def generator_digests(device: torch.device) -> dict[str, str]:
    """Return a digest of the state of each random generator of this process, by its name."""
    states = RandomState(device).state_dict()
    return {name: digest_of_state(state) for name, state in states.items()}
