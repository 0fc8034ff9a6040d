"""Fingerprints of data: short digests that change with what a split holds, found in moments.

They tell a resumed run that its data are no longer those that it began with. What is small is read
whole; of what is large, some samples at fixed places stand for all.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

WHOLE_BYTES = 64 * 2**20  # of the arrays of one split that are read whole
ROWS = 256  # of a larger array that are read
PROBES = 5  # samples of a data set that is read sample by sample
READINGS = 3  # of each of these: samples that are drawn at random differ from one to the next


class UnknownContentError(Exception):
    """A value whose bytes can't be told: it has no fingerprint."""


def places(count: int, most: int) -> list[int]:
    """Return positions spread evenly over `count`, the first and the last among them."""
    if count <= most:
        return [*range(count)]
    return [index * (count - 1) // (most - 1) for index in range(most)]


def fingerprint_of_arrays(arrays: Mapping[str, Any]) -> str:
    """Return a digest of tensors or arrays by name: of their shapes, types and contents."""
    digest = hashlib.sha256()
    is_small = sum(values.nbytes for values in arrays.values()) <= WHOLE_BYTES
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype};".encode())
        rows = values if is_small else values[places(len(values), ROWS)]
        if isinstance(rows, np.ndarray):
            digest.update(np.ascontiguousarray(rows).data)
        else:
            add(digest, rows)
    return digest.hexdigest()[:16]


def fingerprint_of_samples(count: int, read: Any) -> str | None:
    """Return a digest of some samples of a data set, and of how many it has.

    Args:
        read: returns a sample by its number, and leaves random generators as they were.

    Returns:
        None where a sample can't be read here, differs from one reading to the next, or holds what
        can't be told by its bytes.
    """
    readings = set()
    for _ in range(READINGS):
        digest = hashlib.sha256(f"{count};".encode())
        try:
            for number in places(count, PROBES):
                add(digest, read(number))
        except Exception:  # of the data set's own; training reads the sample again and tells it
            return None
        readings.add(digest.hexdigest()[:16])
    return readings.pop() if len(readings) == 1 else None


def fingerprint_of_splits(fingerprints: Mapping[str, str | None]) -> str | None:
    """Return one digest of the splits' own; None where no split has any."""
    known = {name: value for name, value in fingerprints.items() if value is not None}
    if not known:
        return None
    return hashlib.sha256(repr(sorted(known.items())).encode()).hexdigest()[:16]


def add(digest: Any, value: Any) -> None:
    """Add a nest of values to a digest; an `UnknownContentError` for any other object."""
    digest.update(f"{type(value).__name__} ".encode())
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O":
        digest.update(f"{value.shape} {value.dtype};".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            add(digest, key)
            add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)};".encode())
        for item in value:
            add(digest, item)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of Pillow
        digest.update(f"{value.size} {value.mode};".encode())
        digest.update(value.tobytes())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            add(digest, field.name)
            add(digest, getattr(value, field.name))
    else:
        raise UnknownContentError(type(value).__name__)
