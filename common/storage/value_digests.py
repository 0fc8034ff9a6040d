"""SHA-256 digests of values in memory: tensors, arrays and plain values, also nested.

Two functions walk through a nest. They differ in what counts, because they serve two purposes:

- `add_contents` is for the samples of a data set. All types and all orders count. An object whose
  contents are unknown is an error, because a fingerprint that misses a change would be wrong.
- `add_state` is for the states of two runs, which `recipes prove` compares. The order of mappings
  and sets does not count, nor do the types of containers, because a restored state may differ in
  them. Of an object whose contents are unknown, only the type counts, because a state may contain
  anything.

Fingerprints and digests of weights are stored in configs and in the names of caches. So these
functions must give the same digest for the same value in all versions of this library.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from common.storage.digests import SHORT

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Digest(Protocol):
    """A digest of `hashlib` that is not complete yet."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class UnknownContentError(Exception):
    """A value has no digest of its contents, because its type can't be turned into bytes."""


def bytes_of_tensor(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in the order of their indices.

    They do not depend on the device, or on the order of the elements in memory.

    Raises:
        Exception: torch's error for a tensor without such bytes: sparse, quantized, or on the meta
            device.
    """
    elements = tensor.detach().cpu().contiguous().reshape(-1)
    # NumPy has no bf16, so view the elements as bytes first.
    return elements.view(torch.uint8).numpy().data


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the names, shapes, dtypes and bytes of tensors, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(bytes_of_tensor(tensor))
    return digest.hexdigest()


def add_contents(digest: Digest, value: object) -> None:
    """Add a value to a digest: a tensor, array, number, string, image, or a nest of these.

    Types, shapes and the lengths of lists are added as well. They tell apart nests of the same
    values, such as a list of two numbers and two lists of one number.

    Raises:
        UnknownContentError: the value is, or holds, an object of another type or an array of
            objects. The bytes of such an array are addresses, which differ in each process.
    """
    digest.update(f"{type(value).__name__} ".encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype};".encode())
        digest.update(bytes_of_tensor(value))
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O":
        digest.update(f"{value.shape} {value.dtype};".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            add_contents(digest, key)
            add_contents(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)};".encode())
        for item in value:
            add_contents(digest, item)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
    elif isinstance(value, Image.Image):
        digest.update(f"{value.size} {value.mode};".encode())
        digest.update(value.tobytes())
    # `is_dataclass` is also true for a class. Only an instance has values.
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            add_contents(digest, field.name)
            add_contents(digest, getattr(value, field.name))
    else:
        raise UnknownContentError(type(value).__name__)


def digest_of_state(value: object) -> str:
    """Return a short digest of a value: see `add_state`."""
    digest = hashlib.sha256()
    add_state(digest, value)
    return digest.hexdigest()[:SHORT]


def add_state(digest: Digest, value: object) -> None:
    """Add a value to a digest: a tensor, an array, a plain value, or a nest of these.

    The order of mappings and sets does not matter. For any other object, only the type matters.
    """
    if isinstance(value, torch.Tensor):
        add_tensor_of_state(digest, value)
    elif isinstance(value, np.ndarray):
        add_array_of_state(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=sorting_key):
            add_state(digest, key)
            add_state(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)}".encode())
        for item in value:
            add_state(digest, item)
    elif isinstance(value, (set, frozenset)):
        digest.update(f"set {len(value)}".encode())
        for item in sorted(value, key=sorting_key):
            add_state(digest, item)
    elif isinstance(value, (*PLAIN_TYPES, Enum, PurePath, torch.dtype, torch.device, torch.Size)):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        digest.update(f"{type(value).__qualname__};".encode())


def sorting_key(item: object) -> tuple[str, str]:
    """Return a key by which items of different types can be sorted together."""
    return type(item).__name__, repr(item)


def add_tensor_of_state(digest: Digest, tensor: torch.Tensor) -> None:
    """Add a tensor's dtype, shape and bytes. For a sharded tensor, add only this rank's rows.

    For a sparse or quantized tensor, or a tensor on the meta device, add no bytes.
    """
    values = tensor.detach()
    if hasattr(values, "to_local"):  # a DTensor; importing its class takes a second
        values = values.to_local()
    digest.update(f"{values.dtype} {tuple(values.shape)};".encode())
    if values.device.type == "meta" or values.layout != torch.strided or values.is_quantized:
        return
    digest.update(bytes_of_tensor(values))


def add_array_of_state(digest: Digest, array: np.ndarray) -> None:
    """Add an array's dtype, shape and bytes.

    For an array of objects, add the objects in place of the bytes, which are addresses.
    """
    digest.update(f"{array.dtype} {array.shape};".encode())
    if array.dtype == object:
        add_state(digest, array.tolist())
    else:
        digest.update(np.ascontiguousarray(array).tobytes())
