"""Evaluation in training: averaged buffers that are restored, and random numbers."""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import nn

from common.checkpoints.adapters import RandomState
from common.training.evaluation.mode import average_buffers, evaluation_mode, keep_buffers

if TYPE_CHECKING:  # a rank of this file does not find the package of the tests
    from tests.launch import Runner


def network(rank: int) -> nn.Module:
    """Return a network with buffers of several types and shapes, different on each rank."""
    model = nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3))
    model.register_buffer("scale", torch.zeros(()))
    model.register_buffer("table", torch.zeros(2, 3, dtype=torch.float64))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    generator = torch.Generator().manual_seed(rank)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(-1, 1, generator=generator)
        else:
            buffer.fill_(rank)
    return model


def reduced(calls: list[str], values: torch.Tensor, reduction: str) -> torch.Tensor:
    """Average over two processes as an Accelerator does."""
    calls.append(reduction)
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total.div_(2)


def on_rank(rank: int, folder: Path) -> None:
    """Average the buffers and undo that, and save them after each step."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    calls: list[str] = []
    accelerator: Any = SimpleNamespace(num_processes=2, reduce=partial(reduced, calls))
    model = network(rank)
    undo = average_buffers(accelerator, model)
    assert calls == ["mean"]
    save_file(dict(model.named_buffers()), folder / f"averaged-{rank}")
    undo()
    save_file(dict(model.named_buffers()), folder / f"undone-{rank}")
    torch.distributed.destroy_process_group()


def test_buffers_of_two_processes_are_averaged_in_one_call(runner: Runner, tmp_path: Path) -> None:
    """The result equals that of separate averages, and integers stay as they are."""
    ranks_of_this_file = runner.run(
        Path(__file__), tmp_path, launcher="two forks", output_directory=False, succeeds=False
    )
    assert ranks_of_this_file.returncode == 0, ranks_of_this_file.errors
    ranks = [dict(network(rank).named_buffers()) for rank in range(2)]
    for rank, buffers in enumerate(ranks):
        averaged = load_file(tmp_path / f"averaged-{rank}")
        undone = load_file(tmp_path / f"undone-{rank}")
        for name, value in buffers.items():
            assert torch.equal(undone[name], value)
            mean = (ranks[0][name] + ranks[1][name]) / 2
            assert torch.equal(averaged[name], mean if value.is_floating_point() else value)


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_buffers_keep_their_bits(world_size: int, dtype: torch.dtype) -> None:
    """A mask of the lowest numbers does not become infinite, and a table is not rounded."""
    from tests.ranks import on_ranks

    limits = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(world_size)
    table = torch.randn(500, generator=generator).to(dtype)
    mask = torch.tensor([limits.min, limits.max, limits.tiny, 0.0, -torch.inf], dtype=dtype)

    def averaged(accelerator: Any) -> list[torch.Tensor]:
        model = nn.Module()
        model.register_buffer("table", table.clone())
        model.register_buffer("mask", mask.clone())
        average_buffers(accelerator, model)
        return [*model.buffers()]

    for buffers in on_ranks(world_size, averaged):
        assert torch.equal(buffers[0], table)
        assert torch.equal(buffers[1], mask)


def test_one_process_averages_nothing() -> None:
    """One process averages no buffers, and neither does a model without buffers."""
    model = network(0)
    none = nn.Linear(2, 2)
    alone: Any = SimpleNamespace(num_processes=1)
    before = [buffer.clone() for buffer in model.buffers()]
    average_buffers(alone, model)()
    average_buffers(SimpleNamespace(num_processes=2), none)()  # type: ignore[arg-type]
    assert all(map(torch.equal, before, model.buffers()))


def test_evaluation_draws_repeatably_and_restores_generators() -> None:
    """Each rank draws its own numbers, whatever was drawn before, and modules keep their modes."""
    drawn = []
    for seed in range(2):
        for rank in range(2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
            model[1].eval()  # a frozen layer
            accelerator: Any = SimpleNamespace(num_processes=1, process_index=rank)
            generators = RandomState(torch.device("cpu"))
            expected = generators.state_dict()
            with evaluation_mode(accelerator, model, generators, seed=5):
                assert not model[0].training
                drawn.append((rank, float(torch.rand(())), np.random.rand(), random.random()))
            assert str(generators.state_dict()) == str(expected)
            assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert len(drawn) == 4
    assert len(set(drawn)) == 2


def test_training_can_use_tensors_of_an_evaluation() -> None:
    """A model may keep a table of its first forward pass, and a loss may weigh earlier errors."""
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0)
    model = nn.Linear(2, 2)
    with evaluation_mode(accelerator, model, RandomState(torch.device("cpu")), seed=0):
        table = model(torch.ones(3, 2)).sin()
    assert not table.requires_grad
    (model(torch.ones(3, 2)) * table).sum().backward()  # the product keeps the table
    assert model.weight.grad is not None


def test_buffers_are_restored() -> None:
    """All of them are, integers included."""
    model = network(0)
    before = [buffer.clone() for buffer in model.buffers()]
    restore_buffers = keep_buffers(model)
    for buffer in model.buffers():
        buffer.add_(3)
    restore_buffers()
    assert all(map(torch.equal, before, model.buffers()))


if __name__ == "__main__":  # launched by the test above, once for each rank
    on_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
