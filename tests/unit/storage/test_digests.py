"""Digests: their values never change, because caches, checkpoints and configs store them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from common.data.fingerprint import fingerprint_of_arrays
from common.lifecycle.initial_digest import digest_of_model
from common.storage import digests
from common.storage.digests import (
    bytes_of_tensor,
    digest_of_json,
    is_as_signed,
    remembered_sha256_of_file,
    sha256_of_bytes,
    sha256_of_file,
    short_digest,
    signed,
    size_and_sha256,
)
from common.tools.prove.digests import digest_of_state

VALUE = {"b": [1, 2.5, None, True], "a": "größer"}
DIGEST = "55fefafe3180f80a48b8e50d981b0e0c3115d76e8430ce5f016810c1a25bf382"
# Of the three bytes "abc", as FIPS 180-2 states it in appendix B.1.
OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_digest_of_json_is_the_stored_one() -> None:
    """The order of keys does not matter."""
    assert digest_of_json(VALUE) == digest_of_json(dict(reversed(VALUE.items()))) == DIGEST
    assert short_digest(VALUE) == DIGEST[:16]


def test_digest_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert size_and_sha256(path) == (3, OF_ABC)
    assert sha256_of_file(path) == remembered_sha256_of_file(path) == OF_ABC
    assert sha256_of_bytes(b"abc") == OF_ABC
    for unreadable in (tmp_path / "none", tmp_path):
        with pytest.raises(OSError, match=unreadable.name):
            sha256_of_file(unreadable)


def test_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the same size with other contents is read again."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    readings: list[Path] = []
    read = digests.sha256_of_file
    monkeypatch.setattr(digests, "sha256_of_file", lambda path: readings.append(path) or read(path))
    assert {remembered_sha256_of_file(path) for _ in range(3)} == {OF_ABC}
    assert len(readings) == 1
    path.write_bytes(b"abd")
    os.utime(path, ns=(1, 1))
    assert remembered_sha256_of_file(path) != OF_ABC
    assert len(readings) == 2


def test_edit_of_a_signed_object_is_noticed() -> None:
    """An object without a signature counts as edited."""
    whole = signed(VALUE)
    assert whole == {**VALUE, "sha256": DIGEST}
    assert signed(whole) == whole
    assert is_as_signed(whole)
    assert not is_as_signed({**whole, "a": "kleiner"})
    assert not is_as_signed({**whole, "c": 1})
    assert not is_as_signed(VALUE)


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


def test_bytes_of_a_tensor_are_those_of_its_elements() -> None:
    """The order in memory does not matter, and a tensor may be empty or have no dimensions."""
    images = torch.arange(16, dtype=torch.int16).reshape(1, 2, 2, 4)
    expected = b"".join(number.to_bytes(2, "little") for number in range(16))
    assert bytes_of_tensor(images) == expected
    assert bytes_of_tensor(images.to(memory_format=torch.channels_last)) == expected
    assert bytes_of_tensor(torch.tensor(3, dtype=torch.uint8)) == b"\x03"
    assert bytes_of_tensor(torch.ones(2, requires_grad=True)) == b"\x00\x00\x80\x3f" * 2
    assert bytes_of_tensor(torch.empty(0, 3)) == b""
