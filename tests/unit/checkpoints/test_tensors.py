"""Files of tensors: read as written, or one sentence. Nothing in them is ever executed."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from common.checkpoints.tensors import read_tensors, write_in_turn, write_tensors
from common.errors import UserError
from common.storage.files import sync
from common.storage.json_files import write_json
from tests.damage import Payload


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Types and values stay, even of non-contiguous tensors. The receipt has size and SHA-256."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        "b": torch.tensor([1, -1], dtype=torch.int64),
        "c": torch.ones(2, dtype=torch.bfloat16),
        "d": torch.tensor(3.0),
    }
    receipt = write_tensors(path, tensors)
    in_turn = tmp_path / "in-turn.safetensors"
    write_in_turn(in_turn, tensors, tensors.values())
    data = path.read_bytes()
    assert receipt.size == len(data)
    assert receipt.sha256 == hashlib.sha256(data).hexdigest()
    for written in (path, in_turn):
        read = read_tensors(written)
        assert read.keys() == tensors.keys()
        for name, value in tensors.items():
            assert read[name].dtype == value.dtype
            assert torch.equal(read[name], value)


def test_damaged_tensors_give_one_sentence(tmp_path: Path) -> None:
    """The file may be missing or cut anywhere. The sentence names it."""
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model\.safetensors can't be read"):
            read_tensors(path)
    path.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors can't be read"):
        read_tensors(path)


def test_pickle_in_place_of_tensors_is_never_executed(tmp_path: Path) -> None:
    """Only safetensors files are read."""
    marker = tmp_path / "executed"
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(UserError):
        read_tensors(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the pickle itself works
    assert marker.exists()


def test_failed_write_raises_an_exception(tmp_path: Path) -> None:
    """Checkpoints are written in a thread, which a `SystemExit` would end silently."""
    with pytest.raises((OSError, SafetensorError), match="none"):
        write_tensors(tmp_path / "none" / "model.safetensors", {"a": torch.ones(2)})
    with pytest.raises(OSError, match="none"):
        sync(tmp_path / "none")
    write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    sync(tmp_path)
    assert read_tensors(tmp_path / "model.safetensors")["a"].tolist() == [1, 1]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_honour_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    """This holds for tensors and text."""
    before = os.umask(mask)
    try:
        folder = tmp_path / "model"
        folder.mkdir()
        write_tensors(folder / "model.safetensors", {"weight": torch.ones(2)})
        write_json(folder / "model.json", {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}
