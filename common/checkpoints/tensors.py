"""Writes and reads files of tensors as safetensors, a format that executes nothing when read."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import safetensors.torch
import torch
from safetensors import safe_open

from common.errors import UserError
from common.failures.sentences import reading
from common.run_directory.records import Receipt
from common.storage.digests import size_and_sha256
from common.storage.files import refuse_pipe
from common.storage.json_files import PUT_BACK
from common.system.platforms.files import sync


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> Receipt:
    """Write a file of tensors, wait until it is on the disk, and return its size and SHA-256.

    Raises:
        OSError, SafetensorError: the file can't be written.
    """
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    # Use `save_file`: `safetensors.torch.save` would hold Python's lock, which training needs. It
    # held the lock for 119 ms to save 179 MiB.
    safetensors.torch.save_file(contiguous, path, metadata)
    # The library lets only the file's owner read it. Give it the permissions of the folder, which
    # follow the umask.
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return receipt_of(path)


def receipt_of(path: Path) -> Receipt:
    """Return the size and SHA-256 of a file; an OSError if it can't be read."""
    size, sha256 = size_and_sha256(path)
    return Receipt(size=size, sha256=sha256)


class HeaderEntry(TypedDict):
    """The entry of one tensor in the header of a file."""

    dtype: str  # such as "F32"
    shape: list[int]
    data_offsets: list[int]  # where its bytes start and end, counted from the end of the header


def write_in_turn(
    path: Path, like: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor]
) -> None:
    """Write a file of tensors, with only one of them in memory at a time.

    A sharded model is exported this way, because it may not fit into one rank's memory as a whole.

    Args:
        like: tensors by name, with the shapes and dtypes of the tensors to write; their values are
            not used.
        tensors: the tensors to write, on the CPU, in the order of `like`.
    """
    entries: dict[str, HeaderEntry] = {}
    end = 0
    for name, tensor in like.items():
        start = end
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": dtype_name(tensor),
            "shape": [*tensor.shape],
            "data_offsets": [start, end],
        }
    encoded_header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)  # the format aligns the values to 8 bytes
    # The format: the length of the header in 8 bytes, the header, and the values one after another.
    with path.open("wb") as file:
        file.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for tensor in tensors:
            # NumPy has no bf16, so view the values as bytes first.
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    sync(path)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype in safetensors' headers, such as "F32".

    The name is read from a file with an empty tensor, because the library has no function for it.
    """
    empty_file = safetensors.torch.save({"": tensor.new_empty(0, device="cpu")})
    header = json.loads(empty_file[8:])  # the first 8 bytes are the header's length
    return header[""]["dtype"]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a file by name; a `UserError` if it is not a file of tensors."""
    with reading(str(path), PUT_BACK):
        return safetensors.torch.load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file of tensors; empty if the file has none or can't be read.

    The metadata of lasting files, such as the best model, name the run that wrote them.
    """
    with suppress(UserError, OSError), open_tensors(refuse_pipe(path)) as file:
        return file.metadata() or {}
    return {}


def open_tensors(path: Path) -> safe_open:
    """Open a file of tensors to read single tensors, or some rows of them.

    Raises:
        UserError: the file can't be read.
    """
    with reading(str(path), PUT_BACK):
        return safe_open(path, "pt")
