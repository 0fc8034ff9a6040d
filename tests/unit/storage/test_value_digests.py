"""Digests of tensors and nested values: configs and the names of caches have them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from common.data.versions import fingerprint
from common.data.versions.fingerprint import (
    fingerprint_of_arrays,
    fingerprint_of_samples,
    fingerprint_of_splits,
)
from common.lifecycle.start.initial_digest import digest_of_model
from common.storage.value_digests import (
    UnknownContentError,
    add_contents,
    bytes_of_tensor,
    digest_of_state,
)

# The digests of the values 0 to 5 as a transposed matrix, by dtype: the fingerprint of data, the
# digest of a state in a proof, and the beginning of the digest of initial weights.
DIGESTS_OF_TENSORS = {
    "bool": ("ee049664dcb74dd3", "0e2a6b58666357ae", "884e4814c0a5162b"),
    "uint8": ("aea4af6548cb865d", "1d5537d4053153d1", "a8f70a0a73383301"),
    "int8": ("d17cac7891862ced", "600936862cffb0fd", "127ee010639933b5"),
    "int16": ("f2cb7a7e2eb5ce1f", "8396ab9a1eee4533", "6701b554ccdc4ce8"),
    "int32": ("082f33146e024c36", "4569bb36b9de6020", "c1dea0e68f80de08"),
    "int64": ("f4eb898921873432", "74fea6530d801e3f", "f6aad2f44657644a"),
    "float8_e4m3fn": ("6cc2cd5e88516b7a", "97ae85be1a7a9801", "2ef7bedecc2bfb81"),
    "float16": ("9e49a198f8bc0dc9", "7a80c1367a59039b", "164046af550d1116"),
    "bfloat16": ("ed22128f8c3cf47c", "ba87469c49b12f94", "d9caf11a5ceea2c9"),
    "float32": ("5e0f6617cd29d728", "4f3c729162fff11b", "2c300d7e68f02edb"),
    "float64": ("2de426102e45d101", "bcbc94cb77535395", "8d2a31a901917875"),
    "complex64": ("065cc6db7c262038", "7d896ac83f779c73", "a728bf5ba402678e"),
    "complex128": ("d89aaba4958da2ab", "a80bbc4a33f2b10c", "8dedbe6f25b6f51e"),
}


@pytest.mark.parametrize("name", DIGESTS_OF_TENSORS)
def test_digests_of_tensors_are_the_stored_ones(name: str) -> None:
    """Checkpoints, receipts and configs of earlier versions have them."""
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, name)).T
    model = nn.Module()
    model.register_buffer("values", tensor)
    digest_of_weights = digest_of_model(model)
    assert digest_of_weights is not None
    assert DIGESTS_OF_TENSORS[name] == (
        fingerprint_of_arrays({"values": tensor}),
        digest_of_state(tensor),
        digest_of_weights[:16],
    )


@dataclasses.dataclass
class Point:
    """A value with fields."""

    x: float
    name: str


class Color(Enum):
    RED = 1


NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)
LARGE = np.arange(8000, dtype=np.float32).reshape(2000, 4)
# Values of each type, by a word for them: the digest of contents, None if they are unknown, and
# that of a state. Earlier versions of this library computed them.
DIGESTS_OF_VALUES: dict[str, tuple[Any, str | None, str]] = {
    "none": (None, "9e3aa23a593b5811", "a0a12dc61bc006e2"),
    "bool": (True, "3e5e59363097833e", "fec5a5f51e01f480"),
    "int": (3, "b26c31a8f5d30556", "82e8c64cb31e4970"),
    "float": (0.1, "67bb42e37cf94ae1", "7d6e92d24d1fc6ac"),
    "complex": (1 + 2j, "b14bfbd7da0e3ac4", "d2fc885756203c45"),
    "text": ("größer \ud800", "85e4e773351fea70", "a303e487362f76c7"),
    "bytes": (b"abc", "56b313add9200588", "07c2b2afe1c12562"),
    "scalar": (np.float32(0.5), "10c8db13c9565b4a", "cdd419b7421b352e"),
    "array": (NUMBERS, "ee7de0e0cd61b777", "c60c3192fa5716ed"),
    "transposed array": (NUMBERS.T, "01390ea208c49c39", "af3b3f2aef46ec88"),
    "objects": (np.array([1, "a", None], dtype=object), None, "4e5f9a308eed80fd"),
    "tensor": (torch.from_numpy(NUMBERS), "cc1959fb4d7f15d7", "f32fb3506174d707"),
    "parameter": (nn.Parameter(torch.from_numpy(NUMBERS)), "809fa067a665e67c", "f32fb3506174d707"),
    "list": ([1, [2.0, "a"], ()], "7c7dd834aef25bf6", "926e8bf5da2aacae"),
    "shape": (torch.Size([2, 3]), "29b93972b362f5da", "883678e555844abf"),
    "dict": ({"b": 1, "a": {"c": [None]}}, "343bd48e0048abf2", "ffce66e8aaf7663f"),
    "counts": (Counter("abracadabra"), "cc58964afac3ab83", "0e97b4a3f90be4ab"),
    "image": (Image.new("RGB", (3, 2), (1, 2, 3)), "4c25052a0aacd9f2", "768799b168639de7"),
    "dataclass": (Point(0.5, "a"), "69a1456aee60d959", "c07705a179cf3943"),
    "sample": (
        {"image": NUMBERS.astype(np.uint8), "label": 3, "name": "é"},
        "6a23d954fa57f477",
        "5b47803f0c9c9804",
    ),
    "set": ({"b", "a", 1}, None, "8d5d189d7aff51ed"),
    "enum": (Color.RED, None, "54e7bb7fc86e5715"),
    "path": (PurePosixPath("a/b"), None, "4de79998b82220df"),
    "dtype": (torch.bfloat16, None, "8a7a47426bc5c4e2"),
    "device": (torch.device("cpu"), None, "dbd5e7c05d8cc179"),
    "function": (len, None, "d3819bc77dab1343"),
    "class": (Point, None, "f35365f071b42229"),
}


@pytest.mark.parametrize("name", DIGESTS_OF_VALUES)
def test_digests_of_values_are_the_stored_ones(name: str) -> None:
    """A fingerprint is of contents, and a proof compares states."""
    value, of_contents, of_state = DIGESTS_OF_VALUES[name]
    assert digest_of_state(value) == of_state
    digest = hashlib.sha256()
    if of_contents is None:
        with pytest.raises(UnknownContentError):
            add_contents(digest, value)
    else:
        add_contents(digest, value)
        assert digest.hexdigest()[:16] == of_contents


def test_state_may_hold_tensors_without_bytes() -> None:
    """Only their dtype and shape count. Contents need bytes."""
    meta = torch.empty(2, device="meta")
    sparse = torch.eye(2).to_sparse()
    assert digest_of_state(meta) == "f8ecf9290fb2f18b"
    assert digest_of_state(sparse) == "6fd2dbb7d83a01c7"
    for tensor, message in ((meta, "meta tensor"), (sparse, "memory format")):  # of torch
        with pytest.raises((NotImplementedError, RuntimeError), match=message):
            add_contents(hashlib.sha256(), tensor)


def test_only_contents_depend_on_orders_and_types_of_containers() -> None:
    """A state that was restored may have other ones."""
    pairs = [("a", 1), ("b", [2, 3])]
    others = [dict(pairs[::-1]), OrderedDict(pairs), {"a": 1, "b": (2, 3)}]
    for other in others:
        assert digest_of_state(other) == digest_of_state(dict(pairs))
    contents = []
    for value in [dict(pairs), *others]:
        digest = hashlib.sha256()
        add_contents(digest, value)
        contents.append(digest.hexdigest())
    assert len({*contents}) == 4


# By a word for them: a function that takes a fingerprint, and the fingerprint in earlier configs.
FINGERPRINTS: dict[str, tuple[Callable[[], str | None], str]] = {
    "arrays": (
        lambda: fingerprint_of_arrays({"x": NUMBERS, "y": torch.arange(3)}),
        "9a4091d5c7afa94d",
    ),
    "large array": (lambda: fingerprint_of_arrays({"x": LARGE}), "3df641c1f57d54f4"),
    "large tensor": (
        lambda: fingerprint_of_arrays({"x": torch.from_numpy(LARGE)}),
        "1ee1e62d4e013703",
    ),
    "samples": (
        lambda: fingerprint_of_samples(40, lambda index: {"x": NUMBERS * index, "y": index}),
        "44798386eb7e2262",
    ),
    "splits": (
        lambda: fingerprint_of_splits({"train": "a", "test": None, "validation": "b"}),
        "fc5a7a0043d64ff4",
    ),
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprints_are_the_stored_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run compares them, and caches have them in their names."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 10_000)
    take, expected = FINGERPRINTS[name]
    assert take() == expected


def test_bytes_of_a_tensor_are_those_of_its_elements() -> None:
    """The order in memory does not matter, and a tensor may be empty or have no dimensions."""
    images = torch.arange(16, dtype=torch.int16).reshape(1, 2, 2, 4)
    expected = b"".join(number.to_bytes(2, "little") for number in range(16))
    assert bytes_of_tensor(images) == expected
    assert bytes_of_tensor(images.to(memory_format=torch.channels_last)) == expected
    assert bytes_of_tensor(torch.tensor(3, dtype=torch.uint8)) == b"\x03"
    assert bytes_of_tensor(torch.ones(2, requires_grad=True)) == b"\x00\x00\x80\x3f" * 2
    assert bytes_of_tensor(torch.empty(0, 3)) == b""
