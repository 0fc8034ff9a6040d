"""Splits a nested state into tensors and JSON, and puts it together again.

Checkpoints contain only safetensors and JSON, which execute nothing when they are read, unlike a
pickle. Values that JSON can't express are stored as an object with one key, such as
``{"!tuple": [...]}``.
"""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import safetensors.torch
import torch
from pydantic import JsonValue

from common.checkpoints.shards import Rows, is_sharded, local

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.device_mesh import DeviceMesh

Tensors = dict[str, torch.Tensor]
ARRAY_KINDS = "biufcmM"  # NumPy's letters: booleans, numbers, dates and durations


@overload
def pack(state: dict[str, object]) -> tuple[Tensors, dict[str, JsonValue]]: ...


@overload
def pack(state: object) -> tuple[Tensors, JsonValue]: ...


def pack(state: object) -> tuple[Tensors, JsonValue]:
    """Split a nested state into its tensors and the rest.

    Args:
        state: dicts, lists, tuples, Counters, tensors, NumPy arrays and plain values, nested. A
            subclass, such as a named tuple, becomes a plain dict, list or tuple.

    Returns:
        The tensors by their place in the state, such as "optimizer.state.0.exp_avg", not copied;
        and the rest as JSON, which contains the tensors' names in their place. A tensor that occurs
        twice (tied weights) is stored once.

    Raises:
        TypeError: a checkpoint can't hold a value; the message names its place.
    """
    packer = Packer()
    packed_state = packer.pack_value(state, "")
    return packer.tensors, packed_state


class Packer:
    """Collects the tensors of one state while `pack` walks through it."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.names: dict[Hashable, str] = {}  # names of stored tensors, by `storage_key`

    def pack_value(self, value: object, place: str) -> JsonValue:
        """Return a value as JSON, and store the tensors in it."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, torch.Tensor):
            return {"!tensor": self.store(value, place)}
        # Subclasses of ndarray, such as masked arrays, hold more than their bytes and are refused.
        # NumPy's scalars come before floats, because np.float64 is a float too.
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self.pack_array(value, place)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"!float": str(value)}
        if isinstance(value, (list, tuple)):
            items = [
                self.pack_value(item, place_within(place, number))
                for number, item in enumerate(value)
            ]
            return items if isinstance(value, list) else {"!tuple": items}
        if isinstance(value, dict):
            return self.pack_dict(value, place)
        raise unfit_error(value, place)

    def pack_array(self, value: np.ndarray | np.generic, place: str) -> dict[str, JsonValue]:
        """Store the bytes of a NumPy array or scalar as a tensor, and return JSON for it.

        The JSON has the tensor's name, and the dtype and shape of the array.
        """
        if value.dtype.kind not in ARRAY_KINDS:
            raise unfit_error(value, place)
        # A bytearray is writable, as torch expects of memory that it shares.
        raw_bytes = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        tag = "!array" if isinstance(value, np.ndarray) else "!scalar"
        return {tag: [self.store(raw_bytes, place), value.dtype.str, [*value.shape]]}

    def pack_dict(self, value: dict[object, object], place: str) -> dict[str, JsonValue]:
        """Return a dict or Counter as JSON; its keys must be strings or integers."""
        packed: dict[str | int, JsonValue] = {}
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise unfit_error(key, place_within(place, key))
            packed[key] = self.pack_value(item, place_within(place, key))
        pairs: list[JsonValue] = [[key, item] for key, item in packed.items()]
        if isinstance(value, Counter):
            return {"!Counter": pairs}
        # Keys in JSON are strings, and those that begin with "!" are tags here. A dict with any
        # other key is stored as pairs.
        with_json_keys: dict[str, JsonValue] = {}
        for key, item in packed.items():
            if not isinstance(key, str) or key.startswith("!"):
                return {"!dict": pairs}
            with_json_keys[key] = item
        return with_json_keys

    def store(self, tensor: torch.Tensor, place: str) -> str:
        """Store a tensor, unless it is stored already, and return its name."""
        if tensor.layout is not torch.strided or tensor.is_meta or not can_hold(tensor.dtype):
            raise unfit_error(tensor, place)
        tensor = tensor.detach()
        if not is_sharded(tensor):
            # A conjugate or negative view shares its values with another tensor, and torch applies
            # the operation when it reads them. Apply it now, because a file contains only values.
            tensor = tensor.resolve_conj().resolve_neg()
        key = storage_key(tensor)
        if key not in self.names:
            name = place.encode("ascii", "backslashreplace").decode()
            while name in self.tensors:  # with dots in keys, two places can have the same name
                name += "_"
            self.names[key] = name
            self.tensors[name] = tensor
        return self.names[key]


def place_within(place: str, key: object) -> str:
    """Return the place of an item in a container, such as "optimizer.state"; see `pack`."""
    return f"{place}.{key}" if place else f"{key}"


def unpack(
    tensors: Mapping[str, torch.Tensor | Rows],
    rest: JsonValue,
    mesh: "DeviceMesh | None" = None,
) -> Any:
    """Return the state that `pack` split. Its tensors and arrays are copies.

    The result is `Any`, because only the caller, whose state it is, knows its type.

    Args:
        tensors: the tensors by name, as `pack` returned them. `Rows` are tensors that are still on
            the disk; each rank reads its own rows.
        rest: the JSON that `pack` returned.
        mesh: the ranks over which to shard the tensors that are `Rows`; None: they are read whole.
    """
    copies: Tensors = {}
    for name, value in tensors.items():
        copies[name] = value.read(mesh) if isinstance(value, Rows) else value.clone()
    return Unpacker(copies).unpack_value(rest)


class Unpacker:
    """Puts one state together again, from the JSON and the tensors of `pack`."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def unpack_value(self, value: JsonValue) -> Any:
        """Return a value of the state from its JSON."""
        if isinstance(value, list):
            return [self.unpack_value(item) for item in value]
        if not isinstance(value, dict):
            return value
        # A tagged value is a dict with one key, the tag. No key of any other dict is a tag: see
        # `pack_dict`. So the first key is enough to tell.
        tag = next(iter(value), "")
        if tag.startswith("!"):
            return self.unpack_tagged(tag, value[tag])
        return {key: self.unpack_value(item) for key, item in value.items()}

    def unpack_tagged(self, tag: str, content: Any) -> object:
        """Return a value that JSON can't express from its tag and what follows it.

        Raises:
            ValueError: a state has no such tag.
        """
        if tag == "!tensor":
            return self.tensors[content]
        if tag == "!array":
            return self.unpack_array(*content)
        if tag == "!scalar":
            return self.unpack_array(*content)[()]  # an array without dimensions as a scalar
        if tag == "!float":
            return float(content)
        items = self.unpack_value(content)
        if tag == "!tuple":
            return tuple(items)
        if tag == "!dict":
            return dict(items)  # the items are lists [key, value]
        if tag == "!Counter":
            return Counter(dict(items))
        raise ValueError(f"{tag} is not a tag of a state")

    def unpack_array(self, name: str, dtype: str, shape: list[int]) -> np.ndarray:
        """Return the array whose bytes `Packer.pack_array` stored."""
        return self.tensors[name].numpy().view(dtype).reshape(shape)


def unfit_error(value: object, place: str) -> TypeError:
    """Return the error for a value that a checkpoint can't hold."""
    details = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    return TypeError(f"{place}: a value of type {type(value).__name__}{details} can't be kept")


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that two tensors share if they are views of the same elements (tied weights)."""
    tensor = local(tensor)
    if tensor.numel() == 0:
        return object()  # a unique key, because empty tensors have no address to distinguish them
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@functools.cache
def can_hold(dtype: torch.dtype) -> bool:
    """Whether safetensors can store tensors of a dtype, found by trying it once."""
    try:
        return bool(safetensors.torch.save({"": torch.empty(1, dtype=dtype)}))
    except Exception:  # safetensors refuses dtypes with errors of different classes
        return False
