"""Any nest of containers, tensors, arrays and plain values, as tensors and JSON, and back."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch

from common.checkpoints.shards import Rows, is_sharded, local

Tensors = dict[str, torch.Tensor]


def pack(state: Any) -> tuple[Tensors, Any]:
    """Split a nest into tensors, not copied, by their place, and what JSON can hold.

    What JSON has no word for is an object of one key, such as ``!tuple``; a tensor that is there
    twice (tied weights) is stored once. A TypeError names the place of what can't be kept.
    """
    tensors: Tensors = {}
    names: dict[Any, str] = {}

    def stored(tensor: torch.Tensor, place: str) -> str:
        if tensor.layout is not torch.strided or tensor.is_meta or not can_hold(tensor.dtype):
            raise unfit(tensor, place)
        tensor = tensor.detach()
        if not is_sharded(tensor):
            tensor = tensor.resolve_conj().resolve_neg()
        key = identity(tensor)
        if key not in names:
            place = place.encode("ascii", "backslashreplace").decode()
            while place in tensors:  # of a key with a dot in it
                place += "_"
            names[key], tensors[place] = place, tensor
        return names[key]

    def packed(value: Any, place: str) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, torch.Tensor):
            return {"!tensor": stored(value, place)}
        if type(value) is np.ndarray or isinstance(value, np.generic):
            if value.dtype.kind not in "biufcmM":
                raise unfit(value, place)
            raw = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
            kind = "!array" if isinstance(value, np.ndarray) else "!scalar"
            return {kind: [stored(raw, place), value.dtype.str, list(value.shape)]}
        if isinstance(value, float):
            return value if value - value == 0 else {"!float": str(value)}
        inside = f"{place}." if place else ""
        if isinstance(value, (list, tuple)):
            items = [packed(item, f"{inside}{number}") for number, item in enumerate(value)]
            return items if isinstance(value, list) else {"!tuple": items}
        if not isinstance(value, dict):
            raise unfit(value, place)
        for key in value:
            if not isinstance(key, (str, int)):
                raise unfit(key, f"{inside}{key}")
        pairs = [[key, packed(item, f"{inside}{key}")] for key, item in value.items()]
        if isinstance(value, Counter):
            return {"!Counter": pairs}
        is_plain = all(isinstance(key, str) and not key.startswith("!") for key in value)
        return dict(pairs) if is_plain else {"!dict": pairs}

    return tensors, packed(state, "")


def unpack(tensors: Mapping[str, torch.Tensor | Rows], rest: Any, mesh: Any = None) -> Any:
    """Return what `pack` took, in memory of its own; what was sharded, over `mesh` if given."""
    copies = {
        name: value.read(mesh) if isinstance(value, Rows) else value.clone()
        for name, value in tensors.items()
    }

    def array(name: str, dtype: str, shape: list[int]) -> Any:
        return copies[name].numpy().view(dtype).reshape(shape)

    kinds: dict[str, Callable[[Any], Any]] = {
        "!tensor": lambda name: copies[name],
        "!array": lambda value: array(*value),
        "!scalar": lambda value: array(*value)[()],
        "!float": float,
        "!tuple": lambda value: tuple(map(unpacked, value)),
        "!dict": lambda pairs: dict(map(unpacked, pairs)),
        "!Counter": lambda pairs: Counter(dict(map(unpacked, pairs))),
    }

    def unpacked(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(unpacked, value)]
        if not isinstance(value, dict):
            return value
        kind = next(iter(value), "")
        if kind in kinds:
            return kinds[kind](value[kind])
        return {key: unpacked(item) for key, item in value.items()}

    return unpacked(rest)


def unfit(value: Any, place: str) -> TypeError:
    details = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    return TypeError(f"{place}: a value of type {type(value).__name__}{details} can't be kept")


def identity(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common when they are the same memory, seen alike."""
    tensor = local(tensor)
    if tensor.numel() == 0:
        return object()  # nothing has no address
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@functools.cache
def can_hold(dtype: torch.dtype) -> bool:
    try:
        return bool(safetensors.torch.save({"": torch.empty(1, dtype=dtype)}))
    except Exception:  # of whatever kind safetensors refuses it with
        return False
