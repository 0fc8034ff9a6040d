"""Losses over the rows of all ranks: gradients equal those of one process on the whole batch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.training.gradients import gathering
from common.training.gradients.gathering import Gatherer

if TYPE_CHECKING:  # a rank of this file does not find the package of the tests
    from tests.launch import Runner

WORLD_SIZE = 2
ROWS = 5
MICRO_BATCHES = 3
LOSSES = ("whole", "own rows")


class TwoViews(nn.Module):
    """A projection of two views, with a parameter that is used after gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, views: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the features of both views [rows, 4] each, and the scale."""
        first, second = (F.normalize(self.body(view), dim=-1) for view in views.unbind(1))
        return first, second, self.log_scale.exp()


def model_and_batches() -> tuple[TwoViews, torch.Tensor]:
    """Return a model, and the views of all ranks [micro-batches, world_size, rows, 2, 6]."""
    torch.manual_seed(3)
    model = TwoViews().double()
    shape = (MICRO_BATCHES, WORLD_SIZE, ROWS, 2, 6)
    return model, torch.randn(shape, dtype=torch.float64)


def contrastive(rows: torch.Tensor, columns: torch.Tensor, scale: Any, first: int) -> torch.Tensor:
    """Return InfoNCE: row i belongs to column `first + i`."""
    labels = first + torch.arange(len(rows))
    return F.cross_entropy(scale * rows @ columns.T, labels)


def on_rank(rank: int, folder: Path) -> None:
    """Accumulate the gradients of all micro-batches under DDP, for each form of the loss."""
    store = torch.distributed.FileStore(str(folder / "store"), WORLD_SIZE)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    PartialState._reset_state()
    accelerator: Any = SimpleNamespace(num_processes=WORLD_SIZE, process_index=rank)
    gathering.gather_from_ranks = gather_objects
    gather = Gatherer(accelerator)
    for form in LOSSES:
        bare, batches = model_and_batches()
        model: Any = DistributedDataParallel(bare)
        for number, batch in enumerate(batches[:, rank]):
            model.require_backward_grad_sync = number == MICRO_BATCHES - 1
            first, second, scale = model(batch)
            columns = gather(second)
            if form == "whole":
                loss = contrastive(gather(first), columns, scale, 0)
            else:
                loss = contrastive(first, columns, scale, rank * ROWS)
            (loss / MICRO_BATCHES).backward()
        gradients = {name: p.grad.clone() for name, p in bare.named_parameters()}  # type: ignore[union-attr]
        save_file(gradients, folder / f"{form}-{rank}")
    flags = torch.tensor([rank == 0, True, False])
    assert gather(flags).tolist() == [True, True, False, False, True, False]
    halves = torch.full((1, 2), 1.5 + rank, dtype=torch.bfloat16)
    assert gather(halves).tolist() == [[1.5, 1.5], [2.5, 2.5]]
    with pytest.raises(UserError) as refused:
        gather(torch.ones(2 + rank, 3))
    assert "run.gather got tensors that differ between ranks ((2, 3)" in refused.value.message
    assert "(3, 3)" in refused.value.message
    with pytest.raises(UserError) as refused:
        gather(torch.ones(2, 3 + rank))
    assert "same shape and dtype on each rank: pad rows" in refused.value.advice
    torch.distributed.destroy_process_group()


def gather_objects(accelerator: Any, value: Any) -> list[Any]:
    """Stand in for Accelerate's function, which needs state that a forked process lacks."""
    values: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(values, value)
    return values


def test_gradients_equal_those_of_one_process(runner: Runner, tmp_path: Path) -> None:
    """This holds under DDP with accumulation, whether each rank computes the whole loss or its rows
    only.
    """
    ranks_of_this_file = runner.run(
        Path(__file__), tmp_path, launcher="two forks", output_directory=False, succeeds=False
    )
    assert ranks_of_this_file.returncode == 0, ranks_of_this_file.errors
    model, batches = model_and_batches()
    for batch in batches.flatten(1, 2):
        first, second, scale = model(batch)
        (contrastive(first, second, scale, 0) / MICRO_BATCHES).backward()
    for form in LOSSES:
        for rank in range(WORLD_SIZE):
            gradients = load_file(tmp_path / f"{form}-{rank}")
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_one_process_gets_its_own_rows_back() -> None:
    """On the meta device, which counts operations, the result has the shape of all ranks' rows."""
    rows = torch.ones(2, 3, requires_grad=True)
    alone: Any = SimpleNamespace(num_processes=1)
    assert Gatherer(alone)(rows) is rows
    two: Any = SimpleNamespace(num_processes=2)
    assert Gatherer(two)(rows.to("meta")).shape == (4, 3)


if __name__ == "__main__":  # launched by the test above, once for each rank
    on_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
