"""Digests: their values never change, because caches, checkpoints and configs store them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.storage import digests
from common.storage.digests import (
    digest_of_json,
    is_as_signed,
    remembered_sha256_of_file,
    sha256_of_bytes,
    sha256_of_file,
    short_digest,
    signed,
    size_and_sha256,
)

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
