"""Muon on sharded parameters: the directions and the updates of whole ones."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from common.checkpoints.shards import is_sharded
from common.training.muon import Muon, MuonGroup, orthogonal_directions

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
        sharded = shard(mesh, whole)
        with CommDebugMode() as communication:
            (direction,) = orthogonal_directions([sharded], steps=3)
        assert communication.get_total_counts() == 1, shape
        assert is_sharded(direction)
        assert direction.placements == sharded.placements
        (expected,) = orthogonal_directions([whole], steps=3)
        assert torch.equal(direction.full_tensor(), expected), shape
    for orthogonal in (True, False):
        for found_inf in (None, 0.0, 1.0):
            compare_steps(mesh, orthogonal, found_inf)
    torch.distributed.destroy_process_group()


def compare_steps(mesh: DeviceMesh, orthogonal: bool, found_inf: float | None) -> None:
    """Update sharded parameters and whole ones twice, and compare them.

    Args:
        found_inf: marks of the gradient guard, as in fp16; None: there are none, as in fp32.
    """
    weights = [torch.randn(shape) for shape in SHAPES]
    gradients = [torch.randn(shape) for shape in SHAPES]
    updated = []
    for is_whole in (True, False):
        place = (lambda tensor: tensor.clone()) if is_whole else partial(shard, mesh)
        parameters = [torch.nn.Parameter(place(weight)) for weight in weights]
        group: MuonGroup = {"params": parameters, "orthogonal": orthogonal, "weight_decay": 0.1}
        optimizer = Muon([group], lr=0.1)
        if found_inf is not None:
            optimizer.found_inf = torch.tensor(found_inf)
            optimizer.grad_scale = torch.tensor(8.0)
        for _ in range(2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = place(gradient)
            optimizer.step()
        updated.append([p.full_tensor() if is_sharded(p) else p.detach() for p in parameters])
    for parameter, expected, weight in zip(*updated, weights, strict=True):
        torch.testing.assert_close(parameter, expected)
        assert torch.equal(parameter, weight) == (found_inf == 1)


def shard(mesh: DeviceMesh, whole: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded by rows."""
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def test_sharded_filters_are_updated_as_whole_ones(runner: Runner, tmp_path: Path) -> None:
    """Directions have equal bits on two ranks, and each filter is gathered once for them."""
    ranks_of_this_file = runner.run(
        Path(__file__), tmp_path, launcher="two forks", output_directory=False, succeeds=False
    )
    assert ranks_of_this_file.returncode == 0, ranks_of_this_file.errors


if __name__ == "__main__":  # launched by the test above, once for each rank
    on_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
