"""Evaluation in training: averaged buffers that are restored, the best model, the rehearsal."""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import nn

from common.checkpoints.kinds import RandomState
from common.objective import Objective
from common.training.evaluation import (
    Best,
    Rehearsal,
    average_buffers,
    evaluation_mode,
    keep_buffers,
)

if TYPE_CHECKING:  # a rank of this file does not find the package of the tests
    from tests.launch import Runner

NAN = float("nan")


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
        Path(__file__), tmp_path, launcher="two", output_directory=False, succeeds=False
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


def test_one_process_averages_nothing() -> None:
    """Neither does a model without buffers."""
    model = network(0)
    none = nn.Linear(2, 2)
    alone: Any = SimpleNamespace(num_processes=1)
    before = [buffer.clone() for buffer in model.buffers()]
    average_buffers(alone, model)()
    average_buffers(SimpleNamespace(num_processes=2), none)()  # type: ignore[arg-type]
    assert all(map(torch.equal, before, model.buffers()))


def test_best_is_the_last_of_equal_values() -> None:
    """NaN is never the best, and a resumed run continues the count."""
    best = Best(Objective.parse("rmse:min"))
    improvements = []
    for step, value in enumerate([NAN, 3.0, 2.0, 2.0, NAN, 2.5]):
        improvements.append(best.record(value, step))
    assert improvements == [False, True, True, True, False, False]
    assert (best.value, best.step, best.later) == (2.0, 3, 3)
    again = Best(best.objective)
    again.load_state_dict(best.state_dict())
    assert again == best
    assert again.record(1.0, 9)
    assert (again.value, again.step, again.later) == (1.0, 9, 0)


def test_ties_are_broken_by_loss() -> None:
    """The lower loss wins, then the later step. NaN is not lower."""
    best = Best(Objective.parse("accuracy:max"))
    improvements = []
    for step, loss in enumerate([0.354, 0.1, 0.2, 0.1, NAN, None]):
        improvements.append(best.record(1.0, step, loss))
    assert improvements == [True, True, False, True, False, False]
    assert (best.step, best.later, best.loss) == (3, 5, 0.1)


def test_state_of_older_checkpoints_still_loads() -> None:
    """It has no loss, so that the next tie wins."""
    best = Best(Objective.parse("accuracy:max"))
    best.load_state_dict({"value": 1.0, "step": 4, "later": 1})
    assert best.record(1.0, 8, 0.5)
    assert (best.step, best.later, best.loss) == (8, 2, 0.5)


def test_evaluation_draws_repeatably_and_restores_generators() -> None:
    """Each rank draws its own numbers, whatever was drawn before, and modules keep their modes."""
    drawn = []
    for seed in range(2):
        for rank in range(2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
            model[1].eval()  # a frozen layer
            accelerator: Any = SimpleNamespace(num_processes=1, process_index=rank, mesh=None)
            generators = RandomState(torch.device("cpu"))
            expected = generators.state_dict()
            with evaluation_mode(accelerator, model, generators, seed=5):
                assert not model[0].training
                drawn.append((rank, float(torch.rand(())), np.random.rand(), random.random()))
            assert str(generators.state_dict()) == str(expected)
            assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert len(drawn) == 4
    assert len(set(drawn)) == 2


def test_rehearsal_is_due_once() -> None:
    """It is due from the first batch until recorded, unless a real evaluation is due there."""
    rehearsal = Rehearsal(is_wanted=True)
    rehearsal.begin(is_replaced=False)
    assert rehearsal.is_due
    rehearsal.begin_evaluation()
    assert (rehearsal.is_due, rehearsal.is_on, rehearsal.is_reading) == (False, True, True)
    rehearsal.end_evaluation()
    assert (rehearsal.is_on, rehearsal.is_reading) == (True, False)
    rehearsal.end()
    rehearsal.begin(is_replaced=False)
    assert not rehearsal.is_on
    replaced = Rehearsal(is_wanted=True)
    replaced.begin(is_replaced=True)
    replaced.begin(is_replaced=False)
    assert not replaced.is_on


def test_buffers_are_restored() -> None:
    """All of them are, integers included."""
    model = network(0)
    before = [buffer.clone() for buffer in model.buffers()]
    put_back = keep_buffers(model)
    for buffer in model.buffers():
        buffer.add_(3)
    put_back()
    assert all(map(torch.equal, before, model.buffers()))


if __name__ == "__main__":  # launched by the test above, once for each rank
    on_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
