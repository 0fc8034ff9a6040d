"""Nested tensors and plain values: a round trip through JSON and safetensors changes nothing."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoints.copies import copied
from common.checkpoints.pack import pack, unpack
from common.checkpoints.tensors import read_tensors, write_tensors

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.float8_e4m3fn,
)
ARRAYS = ("?", "i1", "<i4", ">i4", "u8", "f2", "f4", "f8", "c8", "c16", "M8[s]")


def through_files(folder: Path, state: Any) -> Any:
    """Write a state to safetensors and JSON, and return what reading gives back."""
    tensors, rest = pack(state)
    write_tensors(folder / "tensors.safetensors", copied(tensors))
    read = read_tensors(folder / "tensors.safetensors")
    return unpack(read, json.loads(json.dumps(rest)))


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare nests by type, order of keys, and bits."""
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        raw = (
            value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (ours, theirs)
        )
        assert torch.equal(*raw)
    elif isinstance(theirs, (np.ndarray, np.generic)):
        assert type(ours) is type(theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert [*ours] == [*theirs]
        assert [*map(type, ours)] == [*map(type, theirs)]
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert type(ours) is type(theirs)
        assert repr(ours) == repr(theirs)  # also of NaN and -0.0


def random_tensor(generator: random.Random) -> torch.Tensor:
    shape = [generator.randrange(4) for _ in range(generator.randrange(4))]
    dtype = generator.choice(DTYPES)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.frombuffer(bytearray(generator.randbytes(count) or b"0"), dtype=torch.uint8)[:count]
    if dtype is torch.bool:
        raw = raw % 2
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        tensor.view(-1).view(torch.uint8).copy_(raw)
    return tensor.mT if len(shape) > 1 and generator.random() < 0.5 else tensor


def random_array(generator: random.Random) -> Any:
    dtype = np.dtype(generator.choice(ARRAYS))
    shape = [generator.randrange(3) for _ in range(generator.randrange(3))]
    count = math.prod(shape) * dtype.itemsize
    raw = bytes(byte % 2 for byte in generator.randbytes(count)) if dtype == "?" else None
    array = np.frombuffer(raw or generator.randbytes(count), dtype).reshape(shape)
    return array[()] if not shape else array


def random_nest(generator: random.Random, depth: int) -> Any:
    choice = generator.randrange(12 if depth else 9)
    keys: list[Any] = ["a", "a.b", "", "!tensor", "!dict", "ü\ud800", 0, -7, 2**70, "0", True]
    if choice < 3:
        return generator.choice([None, True, False, 0, -1, 2**80, "", "text", "\ud800", "!tensor"])
    if choice == 3:
        return generator.choice([0.1, -0.0, 1e-320, math.nan, math.inf, -math.inf, math.pi])
    if choice < 7:
        return random_tensor(generator)
    if choice < 9:
        return random_array(generator)
    items = [random_nest(generator, depth - 1) for _ in range(generator.randrange(5))]
    if choice == 9:
        return dict(zip(generator.sample(keys, len(items)), items, strict=True))
    return items if choice == 10 else tuple(items)


@pytest.mark.parametrize("seed", range(60))
def test_random_nests_survive_bit_for_bit(tmp_path: Path, seed: int) -> None:
    """Types, order of keys, tensors of any type and shape, and the bits of floats stay the same."""
    generator = random.Random(seed)
    nest = {"all": [random_nest(generator, 4) for _ in range(6)]}
    assert_same(through_files(tmp_path, nest), nest)


def test_all_types_of_tensors_survive(tmp_path: Path) -> None:
    """All types of safetensors survive, also as views and without elements."""
    state = {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES}
    state |= {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.tensor([1.5]).expand(4),
        "slice": torch.arange(10.0)[3:7],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(2, 0, dtype=torch.int64),
    }
    conjugate = state["conjugate"].resolve_conj()
    assert_same(through_files(tmp_path, state), state | {"conjugate": conjugate})


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    """Two names of one tensor are tied. Tensors that only overlap are stored separately."""
    weight = torch.randn(4, 4)
    state = {"a": weight, "deep": [weight.detach()], "T": weight.T, "row": weight[0]}
    tensors, _ = pack(state)
    assert sorted(tensors) == ["T", "a", "row"]
    restored = through_files(tmp_path, state)
    assert_same(restored, state)
    assert restored["a"] is restored["deep"][0]
    restored["a"].zero_()
    assert restored["row"].any()


def test_unpacked_tensors_have_memory_of_their_own(tmp_path: Path) -> None:
    """Neither the file nor the packed tensors change with them, and arrays are writable."""
    state = {"tensor": torch.ones(3), "array": np.ones(3)}
    restored = through_files(tmp_path, state)
    (tmp_path / "tensors.safetensors").write_bytes(b"")
    restored["tensor"] += 1
    restored["array"] += 1
    assert restored["tensor"].tolist() == restored["array"].tolist() == [2, 2, 2]
    assert state["tensor"].tolist() == state["array"].tolist() == [1, 1, 1]


def test_subclasses_of_plain_values(tmp_path: Path) -> None:
    """A `Counter` stays one, as `MultiStepLR` needs. Enums become numbers or text."""

    class Level(enum.IntEnum):
        HIGH = 2

    class Name(enum.StrEnum):
        FIRST = "first"

    state = {"counter": Counter({3: 1, 5: 2}), "ordered": OrderedDict(b=1, a=2)}
    restored = through_files(tmp_path, state)
    assert restored == state
    assert type(restored["counter"]) is Counter
    plain = through_files(tmp_path, [Level.HIGH, Name.FIRST, torch.Size([2, 3]), np.str_("x")])
    assert plain == [2, "first", (2, 3), "x"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: None, "a value of type function can't be kept"),
        (object(), "a value of type object can't be kept"),
        ({1, 2}, "a value of type set can't be kept"),
        (1 + 2j, "a value of type complex can't be kept"),
        (b"bytes", "a value of type bytes can't be kept"),
        (np.array([None]), "a value of type ndarray of object can't be kept"),
        (torch.empty(2, device="meta"), "a value of type Tensor of torch.float32 can't be kept"),
        (torch.eye(2).to_sparse(), "a value of type Tensor of torch.float32 can't be kept"),
        (
            torch.zeros(2, dtype=torch.complex128),
            "a value of type Tensor of torch.complex128 can't be kept",
        ),
    ],
)
def test_unsupported_value_is_named_by_its_place(value: Any, message: str) -> None:
    """The place may be in a dictionary or deep in lists."""
    for state, place in (
        ({"ema": {"decay_fn": value}}, "ema.decay_fn"),
        ({"log": [0, ({"x": value},)]}, "log.1.0.x"),
    ):
        with pytest.raises(TypeError) as error:
            pack(state)
        assert str(error.value) == f"{place}: {message}"


@pytest.mark.parametrize("key", [(1, 2), None, 1.5, torch.zeros(1)])
def test_keys_that_json_cannot_hold_are_refused(key: Any) -> None:
    """The message names their place."""
    with pytest.raises(TypeError, match=r"^ema\..*can't be kept$"):
        pack({"ema": {key: 1}})
