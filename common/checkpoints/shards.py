"""Tensors of which each rank holds some rows, as FSDP2's DTensors: here, and in files."""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch

from common.checkpoints.tensors import open_tensors, read_tensors


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")  # to import DTensor takes a second


def local(tensor: Any) -> torch.Tensor:
    """Return the rows of a tensor that are here: all, where it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_here(mesh: Any, length: int) -> slice:
    """Return which rows of `length` this rank of a mesh holds: as `torch.chunk` shares them out."""
    most = -(-length // mesh.size())
    first, last = (min(most * (mesh.get_local_rank() + end), length) for end in (0, 1))
    return slice(first, last)


def fill(tensor: Any, value: Any) -> None:
    """Copy over a tensor what has its whole shape: sharded as it is, whole, or in a file."""
    rows = rows_here(tensor.device_mesh, len(tensor)) if is_sharded(tensor) else ...
    with torch.no_grad():
        local(tensor).copy_(local(value) if is_sharded(value) else value[rows])


def parts_of(name: str, tensors: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return by file what this rank writes: its rows, and what is whole on rank 0."""
    rows = {key: local(value.detach()) for key, value in tensors.items() if is_sharded(value)}
    whole = {key: value for key, value in tensors.items() if key not in rows and rank == 0}
    files = {f"{name}.safetensors": whole, rows_file(name, rank, ranks): rows}
    return {file: held for file, held in files.items() if held}


def rows_file(name: str, rank: int, ranks: int) -> str:
    return f"{name}-{rank}-of-{ranks}.safetensors"


def read_parts(folder: Path, name: str, files: Collection[str]) -> dict[str, Any]:
    """Return the tensors that all ranks wrote as `parts_of`; of rows one of `files` is enough."""
    rows = re.compile(rf"{re.escape(name)}-\d+-of-(\d+)\.safetensors")
    ranks = max((int(found[1]) for found in map(rows.fullmatch, files) if found), default=0)
    whole = f"{name}.safetensors"
    tensors = read_tensors(folder / whole) if whole in files else {}
    if ranks:
        tensors |= read_rows(folder / rows_file(name, rank, ranks) for rank in range(ranks))
    return tensors


def read_rows(files: Iterable[Path]) -> dict[str, Any]:
    """Return the tensors of which each rank's file has rows, as `Rows`; one file has them whole."""
    opened = [open_tensors(path) for path in files]
    parts = {key: [file.get_slice(key) for file in opened] for key in opened[0].keys()}  # noqa: SIM118
    return {
        key: Rows(slices) if slices[0].get_shape() else opened[0].get_tensor(key)
        for key, slices in parts.items()
    }


class Rows:
    """A tensor in files, of which each has the rows of one rank; read where it is indexed."""

    def __init__(self, parts: Iterable[Any]) -> None:
        """Take safetensors' slices, in the order of the ranks."""
        self.parts = [*parts]
        lengths = (part.get_shape()[0] for part in self.parts)
        self.starts = [*accumulate(lengths, initial=0)]
        self.shape = torch.Size([self.starts[-1], *self.parts[0].get_shape()[1:]])
        self.dtype: torch.dtype = self.parts[0][:0].dtype

    def __getitem__(self, rows: slice | EllipsisType) -> torch.Tensor:
        first, last, _ = (slice(None) if rows is ... else rows).indices(self.shape[0])
        starts = zip(self.parts, self.starts, strict=False)
        return torch.cat([part[max(first - at, 0) : max(last - at, 0)] for part, at in starts])

    def read(self, mesh: Any) -> Any:
        """Return it sharded over the ranks of a mesh, or whole where there is none."""
        if mesh is None:
            return self[...]
        from torch.distributed.tensor import DTensor, Shard

        rows = self[rows_here(mesh, self.shape[0])].to(mesh.device_type)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(rows, mesh, [Shard(0)], shape=self.shape, stride=stride)
