"""Files of tensors, as safetensors: written to the disk, and read without executing anything."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open

from common.errors import UserError
from common.files import plain, reading, receipt_of
from common.platforms import sync


def write_tensors(
    path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write a file of tensors, wait until it is on the disk, and return its size and SHA-256."""
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    # Not `save`: it holds Python's lock, and the training, for 119 ms of 179 MiB.
    safetensors.torch.save_file(contiguous, path, metadata)
    with suppress(OSError):  # the library keeps it from all others; the folder has the umask's mode
        path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return receipt_of(path)


def write_in_turn(path: Path, shapes: Mapping[str, Any], tensors: Iterable[Any]) -> None:
    """Write a file of tensors of these shapes and types, given one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in shapes.items():
        start, end = end, end + like.numel() * like.element_size()
        # The header of a file of nothing has safetensors' word for the type.
        empty = safetensors.torch.save({"": like.new_empty(0, device="cpu")})
        kind = json.loads(empty[8:])[""]["dtype"]
        header[name] = {"dtype": kind, "shape": [*like.shape], "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for tensor in tensors:
            file.write(tensor.numpy().tobytes())
    sync(path)


def read_tensors(path: Path) -> dict[str, Any]:
    """Read a file of tensors; one that holds anything else is refused, and never executed."""
    with reading(str(path)):
        return safetensors.torch.load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the words that a file of tensors was written with; none where it can't be read."""
    with suppress(UserError, OSError), open_tensors(plain(path)) as file:
        return file.metadata() or {}
    return {}


def open_tensors(path: Path) -> Any:
    """Open a file of tensors, to read one of them, or some of its rows, at a time."""
    with reading(str(path)):
        return safe_open(path, "pt")
