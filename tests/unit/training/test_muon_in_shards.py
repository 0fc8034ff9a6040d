"""Muon on sharded filters: the directions of whole filters, for one collective each."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from common.checkpoints.shards import is_sharded
from common.training.muon import orthogonal_directions

if TYPE_CHECKING:  # a rank of this file does not find the package of the tests
    from tests.launch import Runner

WORLD_SIZE = 2
# Wide and tall filters; with 5 and 1 channels, the ranks have different numbers of rows.
SHAPES = [(8, 3, 3, 3), (16, 2), (5, 4, 1, 1), (1, 6)]


def on_rank(rank: int, folder: Path) -> None:
    """Compare the direction of each sharded filter with that of the whole filter."""
    store = torch.distributed.FileStore(str(folder / "store"), WORLD_SIZE)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    torch.manual_seed(0)
    for shape in SHAPES:
        whole = torch.randn(shape)
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        with CommDebugMode() as communication:
            (direction,) = orthogonal_directions([sharded], steps=3)
        assert communication.get_total_counts() == 1, shape
        assert is_sharded(direction)
        assert direction.placements == sharded.placements
        (expected,) = orthogonal_directions([whole], steps=3)
        assert torch.equal(direction.full_tensor(), expected), shape
    torch.distributed.destroy_process_group()


def test_sharded_filters_have_the_directions_of_whole_ones(runner: Runner, tmp_path: Path) -> None:
    """The bits are equal on two ranks, and each filter is gathered once."""
    ranks_of_this_file = runner.run(
        Path(__file__), tmp_path, launcher="two forks", output_directory=False, succeeds=False
    )
    assert ranks_of_this_file.returncode == 0, ranks_of_this_file.errors


if __name__ == "__main__":  # launched by the test above, once for each rank
    on_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
