"""Splits sharded tensors into one file per rank, and reads them on any number of ranks.

A sharded tensor is a DTensor of FSDP2: each rank has some of its rows. Each rank writes its rows to
a separate file. Any number of ranks can read them again, because `Rows` presents the files of all
ranks as one tensor.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch

from common.checkpoints.tensors import open_tensors, read_tensors

if TYPE_CHECKING:  # importing these takes a second
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class SavedRows(Protocol):
    """The rows of a tensor in one file, as `get_slice` of safetensors returns them."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


def is_sharded(tensor: object) -> TypeGuard["DTensor"]:
    """Whether a tensor is a DTensor; this check does not import DTensor, which takes a second."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_here(mesh: "DeviceMesh", length: int) -> slice:
    """Return the slice of rows that this rank has of a sharded tensor with `length` rows in all.

    FSDP2 distributes rows as `torch.chunk` does: equally, except that the last ranks may have fewer
    rows or none.
    """
    rows_per_rank = -(-length // mesh.size())  # rounded up
    start = min(rows_per_rank * mesh.get_local_rank(), length)
    end = min(rows_per_rank * (mesh.get_local_rank() + 1), length)
    return slice(start, end)


def fill(tensor: torch.Tensor, value: "torch.Tensor | Rows") -> None:
    """Copy a value into a tensor, in place. Both must have the same shape over all ranks.

    Args:
        tensor: a plain or a sharded tensor. If it is sharded, this fills this rank's rows.
        value: a whole tensor, `Rows` in files, or a tensor that is sharded in the same way as
            `tensor`.
    """
    with torch.no_grad():
        if is_sharded(value):
            rows_of_value = value.to_local()
        elif is_sharded(tensor):
            rows_of_value = value[rows_here(tensor.device_mesh, len(tensor))]
        else:
            rows_of_value = value[...]
        local(tensor).copy_(rows_of_value)


def files_of_rank(
    name: str, tensors: Mapping[str, torch.Tensor], rank: int, rank_count: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that this rank writes: by the name of the file, then by their own names.

    Each rank writes its rows of the sharded tensors. Rank 0 also writes all other tensors. A file
    without tensors is left out, so the result may be empty.

    Args:
        name: the beginning of the files' names.
        tensors: the tensors of all ranks, by name.
        rank: this rank.
        rank_count: the number of ranks that the tensors are sharded over.
    """
    own_rows = {}
    whole_tensors = {}
    for key, value in tensors.items():
        if is_sharded(value):
            own_rows[key] = local(value.detach())
        elif rank == 0:
            whole_tensors[key] = value
    files = {}
    if whole_tensors:
        files[f"{name}.safetensors"] = whole_tensors
    if own_rows:
        files[rows_file(name, rank, rank_count)] = own_rows
    return files


def rows_file(name: str, rank: int, rank_count: int) -> str:
    """Return the name of the file with one rank's rows of sharded tensors."""
    return f"{name}-{rank}-of-{rank_count}.safetensors"


def read_files_of_ranks(
    folder: Path, name: str, files: Collection[str]
) -> "dict[str, torch.Tensor | Rows]":
    """Return the tensors of a name that `files_of_rank` has spread over the files of all ranks.

    Whole tensors are in one file, which rank 0 wrote. The rows of a sharded tensor are spread over
    one file of each rank. The result is empty if there are no such files.

    Args:
        files: the names of the files that exist. The name of one rank's file of rows is enough,
            because it states how many ranks there were.
    """
    pattern = re.compile(rf"{re.escape(name)}-\d+-of-(\d+)\.safetensors")
    rank_count = 0  # stays 0 if no tensor was sharded
    for file in files:
        match = pattern.fullmatch(file)
        if match is not None:
            rank_count = int(match[1])  # all names that match state the same number
            break
    tensors: dict[str, torch.Tensor | Rows] = {}
    whole_file = f"{name}.safetensors"
    if whole_file in files:
        tensors |= read_tensors(folder / whole_file)
    if rank_count:
        paths = [folder / rows_file(name, rank, rank_count) for rank in range(rank_count)]
        tensors |= read_sharded(paths)
    return tensors


def read_sharded(files: Iterable[Path]) -> "dict[str, torch.Tensor | Rows]":
    """Return the tensors, by name, whose rows are spread over files.

    A tensor's values are read when it is indexed. A tensor without dimensions is the same in all
    files, and is read at once.

    Args:
        files: the files of the ranks, in order. A single file contains whole tensors.
    """
    opened_files = [open_tensors(path) for path in files]
    tensors: dict[str, torch.Tensor | Rows] = {}
    for key in opened_files[0].keys():  # noqa: SIM118 (an open file is not a dict)
        slices = [file.get_slice(key) for file in opened_files]
        has_rows = bool(slices[0].get_shape())
        tensors[key] = Rows(slices) if has_rows else opened_files[0].get_tensor(key)
    return tensors


class Rows:
    """A tensor whose rows are spread over the files of several ranks.

    It has the `shape` and `dtype` of the whole tensor. Indexing it reads only the requested rows.
    """

    def __init__(self, slices: Iterable[SavedRows]) -> None:
        """Keep the rows of each rank's file, in the order of the ranks."""
        self.slices = [*slices]
        lengths = [saved_rows.get_shape()[0] for saved_rows in self.slices]
        # The first row of each slice in the whole tensor, and then the length of the whole tensor.
        self.starts = [*accumulate(lengths, initial=0)]
        self.shape = torch.Size([self.starts[-1], *self.slices[0].get_shape()[1:]])
        self.dtype: torch.dtype = self.slices[0][:0].dtype  # an empty slice reads no values

    def __getitem__(self, rows: slice | EllipsisType) -> torch.Tensor:
        """Read the rows of a slice, or all of them for an ellipsis."""
        requested_rows = slice(None) if isinstance(rows, EllipsisType) else rows
        first, end, _ = requested_rows.indices(self.shape[0])
        pieces = []
        # Take the rows of each file from `first` to before `end`. A file may have none of them, and
        # `end` may lie beyond the file. Not strict: `starts` has one more item than `slices`.
        for saved_rows, start in zip(self.slices, self.starts, strict=False):
            pieces.append(saved_rows[max(first - start, 0) : max(end - start, 0)])
        return torch.cat(pieces)

    def read(self, mesh: "DeviceMesh | None") -> "torch.Tensor | DTensor":
        """Return the tensor: sharded over the ranks of a mesh; without a mesh, whole on the CPU."""
        if mesh is None:
            return self[...]
        from torch.distributed.tensor import DTensor, Shard

        rows = self[rows_here(mesh, self.shape[0])].to(mesh.device_type)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(rows, mesh, [Shard(0)], shape=self.shape, stride=stride)
