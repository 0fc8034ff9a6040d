"""Short digests of tensors and other values, by which two runs are compared bit for bit."""

import hashlib
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath

import numpy as np
import torch

from common.checkpoints.adapters import RandomState
from common.checkpoints.shards import is_sharded, local
from common.storage.digests import SHORT, Digest, bytes_of_tensor

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest_of_state(value: object) -> str:
    """Return a digest of a value: a tensor, an array, a plain value, or a nest of these.

    The order of mappings and sets does not matter. For any other object, only the type matters.
    """
    digest = hashlib.sha256()
    add_value(digest, value)
    return digest.hexdigest()[:SHORT]


def add_value(digest: Digest, value: object) -> None:
    """Add a value to a digest."""
    if isinstance(value, torch.Tensor):
        add_tensor(digest, value)
    elif isinstance(value, np.ndarray):
        add_array(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=sorting_key):
            add_value(digest, key)
            add_value(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)}".encode())
        for item in value:
            add_value(digest, item)
    elif isinstance(value, (set, frozenset)):
        digest.update(f"set {len(value)}".encode())
        for item in sorted(value, key=sorting_key):
            add_value(digest, item)
    elif isinstance(value, (*PLAIN_TYPES, Enum, PurePath, torch.dtype, torch.device, torch.Size)):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        digest.update(f"{type(value).__qualname__};".encode())


def sorting_key(key: object) -> tuple[str, str]:
    return type(key).__name__, repr(key)


def add_tensor(digest: Digest, tensor: torch.Tensor) -> None:
    """Add a tensor's dtype, shape and bytes. For a sharded tensor, add only this rank's rows.

    For a sparse or quantized tensor, or a tensor on the meta device, add no bytes.
    """
    values = tensor.detach()
    if is_sharded(values):
        values = local(values)
    digest.update(f"{values.dtype} {tuple(values.shape)};".encode())
    if values.device.type == "meta" or values.layout != torch.strided or values.is_quantized:
        return
    digest.update(bytes_of_tensor(values))


def add_array(digest: Digest, array: np.ndarray) -> None:
    """Add an array's dtype, shape and bytes. For an array of objects, add the objects instead."""
    digest.update(f"{array.dtype} {array.shape};".encode())
    if array.dtype == object:
        add_value(digest, array.tolist())
    else:
        digest.update(np.ascontiguousarray(array).tobytes())


def generator_digests(device: torch.device) -> dict[str, str]:
    """Return a digest of the state of each random generator of this process, by its name."""
    states = RandomState(device).state_dict()
    return {name: digest_of_state(state) for name, state in states.items()}
