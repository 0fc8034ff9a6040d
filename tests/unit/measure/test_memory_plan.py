"""The memory plan: the planned sizes are those after an update."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from common.data.samples import Work
from common.measure import memory_plan
from common.measure.memory_plan import (
    MemoryPlan,
    mebibytes,
    optimizer_state_bytes,
    plan_text,
    saved_storages,
    state_tensors,
)
from common.measure.stopwatch import FIRST_UPDATES
from common.system.allocator import HEAP
from common.training.optim import decay_groups, start_momentum
from tests.cuda_stand_in import Cuda

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw_fused(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the MLP and of BERT."""
    return torch.optim.AdamW(decay_groups(model, 0.01), lr=1e-3, fused=True)


def sgd_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ResNet before its momentum buffers exist."""
    groups = decay_groups(model, 5e-4)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True)


def sgd_started(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ResNet as `Run.start` leaves it."""
    optimizer = sgd_momentum(model)
    start_momentum(optimizer)
    return optimizer


def plan_of(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> MemoryPlan:
    """Return the plan of a run that needs no call once its memory is measured."""
    return MemoryPlan(accelerator, model, optimizer, loader, when_measured=lambda share: None)


def sgd_plain(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class FakeAccelerator:
    """The attributes of an Accelerator that the plan reads: one process, no accumulation."""

    device = torch.device("cpu")
    sync_gradients = True


@pytest.fixture
def model() -> nn.Module:
    """Return a network with weights, biases, batch norm's buffers, and one frozen layer."""
    layers = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 8)
    )
    layers[3].requires_grad_(False)
    return layers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [adamw_fused, sgd_momentum, sgd_started, sgd_plain])
def test_planned_sizes_equal_those_after_an_update(
    make: MakeOptimizer, precision: str, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, gradients, optimizer state and buffers agree within 10 %."""
    optimizer = make(model)
    accelerator: Any = FakeAccelerator()
    plan = plan_of(accelerator, model, optimizer, loader_of(None))
    for _ in range(FIRST_UPDATES + 1):
        with plan.watching(Work(32)):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(torch.randn(32, 64)).float().square().mean()
            loss.backward()
            optimizer.step()
            gradients = sum(p.grad.numel() * 4 for p in model.parameters() if p.grad is not None)
            optimizer.zero_grad()
    rows = {name: (planned, measured) for name, planned, measured in plan.finish()}
    exact = {
        "weights": sum(p.numel() * 4 for p in model.parameters()),
        "gradients": gradients,
        "optimizer_state": sum(t.numel() * t.element_size() for t in state_tensors(optimizer)),
        "buffers": 2 * 256 * 4 + 8,
    }
    for name, size in exact.items():
        assert rows[name][0] == pytest.approx(size / 2**20, rel=0.1), name
        assert rows[name][1] == pytest.approx(size / 2**20, rel=0.1), name
    assert rows["activations"][0] == rows["activations"][1]
    assert rows["activations"][1]
    assert capsys.readouterr().out.count("memory  activations") == 1
    # The text names each part and the total.
    text = plan_text(plan.facts())
    for word in ("weights", "gradients", "optimizer state", "buffers", "MiB of"):
        assert word in text


def test_sizes_on_the_host_are_called_the_hosts(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some devices do not report the memory of their tensors."""
    accelerator: Any = FakeAccelerator()
    for has_figures, owner in ((False, "host"), (True, "cpu")):
        plan = plan_of(accelerator, model, sgd_plain(model), loader_of(None))
        figures = Mock(return_value=has_figures)
        monkeypatch.setattr(memory_plan, "has_own_memory_figures", figures)
        for _ in range(FIRST_UPDATES):
            with plan.watching(Work(32)):
                model(torch.randn(32, 64)).sum().backward()
        assert f"of the {owner}'s memory" in capsys.readouterr().out


def test_activations_count_each_saved_storage_once() -> None:
    """A linear layer's input and the ReLU before it share a storage."""
    first = nn.Linear(64, 128)
    second = nn.Linear(128, 8)
    images = torch.randn(32, 64)
    with saved_storages([*first.parameters(), *second.parameters()]) as sizes:
        hidden = torch.relu(first(images))
        second(hidden).sum()
    torch.relu(hidden * 2)  # outside the block, so it does not count
    # Each linear layer saves its input. The output of ReLU is the second layer's input.
    assert sum(sizes.values()) == 4 * (32 * 64 + 32 * 128)


def test_unknown_optimizer_state_is_not_guessed(model: nn.Module) -> None:
    """The plan calls it unknown, and the optimizer stays as it was."""
    optimizer = torch.optim.Adafactor(model.parameters())
    assert optimizer_state_bytes(optimizer) is None
    assert not optimizer.state
    accelerator: Any = FakeAccelerator()
    plan = plan_of(accelerator, model, optimizer, loader_of(None))
    assert "optimizer state unknown" in plan_text(plan.facts())
    assert {name: planned for name, planned, _ in plan.finish()}["optimizer_state"] is None


def test_planning_changes_nothing(model: nn.Module) -> None:
    """Weights, gradients and generators stay as they were."""
    optimizer = adamw_fused(model)
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    optimizer_state_bytes(optimizer)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(group["fused"] for group in optimizer.param_groups)


def test_tied_weights_count_once() -> None:
    """Views of one tensor share its bytes."""
    weight = torch.ones(16, 16)
    assert mebibytes([weight, weight.t(), weight[0]]) == 4 * 256 / 2**20


def loader_of(lengths: list[int] | None) -> Any:
    """Return a stand-in for a loader of batches of two texts, with these lengths."""
    texts = None if lengths is None else np.array(lengths)
    return SimpleNamespace(order=SimpleNamespace(batch_size=2, lengths=texts))


def planned_and_measured(plan: MemoryPlan, part: str) -> tuple[float | None, float | None]:
    """Return the planned and the measured size of one part."""
    (row,) = [row for row in plan.finish() if row[0] == part]
    return row[1], row[2]


def test_longest_batch_is_planned_from_the_first_ones() -> None:
    """Activations grow with tokens, and are measured in the longest batch."""
    accelerator: Any = FakeAccelerator()
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    per_token = 4 * (256 + 1024) / 2**20
    plan = plan_of(accelerator, model, sgd_plain(model), loader_of([100, 900, 50, 700]))
    for tokens in (150, 400, 150, 1600):
        assert plan.planned.get("activations") == (
            pytest.approx(1600 * per_token, rel=0.01) if tokens == 1600 else None
        )
        with plan.watching(Work(2, tokens)):
            model(torch.randn(tokens, 256)).sum().backward()
    planned, measured = planned_and_measured(plan, "activations")
    assert planned == pytest.approx(1600 * per_token, rel=0.01)
    assert measured == pytest.approx(1600 * per_token, rel=0.01)


def test_workspace_is_the_remaining_peak_of_the_first_updates() -> None:
    """Neither an earlier nor a later peak counts."""
    # Memory of earlier tests that is freed or returned meanwhile would change the result.
    gc.collect()
    if HEAP.library is not None:
        HEAP.library.malloc_trim(0)
    accelerator: Any = FakeAccelerator()
    model = nn.Linear(64, 8)
    plan = plan_of(accelerator, model, sgd_plain(model), loader_of(None))
    torch.ones(300 * 2**18)  # an earlier peak, like that of reading a checkpoint
    for number in range(FIRST_UPDATES + 1):
        with plan.watching(Work(2)):
            torch.ones((200 if number == FIRST_UPDATES else 100) * 2**18)
            model(torch.randn(32, 64)).sum().backward()
    planned, measured = planned_and_measured(plan, "workspace")
    assert planned == pytest.approx(100, rel=0.1)
    assert measured is None


def test_compiled_model_has_no_hooks() -> None:
    """A compiled model's activations are part of the peak, and not a separate figure."""
    accelerator: Any = FakeAccelerator()
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    model.compile(backend="eager")
    plan = plan_of(accelerator, model, sgd_plain(model), loader_of(None))
    for _ in range(FIRST_UPDATES):
        with plan.watching(Work(2)):
            assert not torch._C._autograd._top_saved_tensors_default_hooks(True)
            model(torch.randn(32, 64)).sum().backward()
    assert planned_and_measured(plan, "activations") == (None, None)
    assert planned_and_measured(plan, "workspace")[0] is not None


def test_run_without_an_update_has_a_plan() -> None:
    """A finished run that is resumed shows the known parts."""
    accelerator: Any = FakeAccelerator()
    model = nn.Linear(64, 8)
    plan = plan_of(accelerator, model, sgd_plain(model), loader_of(None))
    assert planned_and_measured(plan, "workspace") == (None, None)
    assert planned_and_measured(plan, "weights")[0] == pytest.approx(4 * 65 * 8 / 2**20)


class Wrapped(nn.parallel.DistributedDataParallel):
    """DDP without a process group. The stand-in for CUDA reports its buckets as allocated."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("is_distributed", [False, True])
def test_gradient_buckets_count_once(is_distributed: bool, model: nn.Module, cuda: Cuda) -> None:
    """DDP allocates them before the first update, and a single process does not."""
    gradients = mebibytes(p for p in model.parameters() if p.requires_grad)
    lasting = mebibytes([*model.parameters(), *model.buffers()])
    cuda.allocated = int((lasting + 5 + is_distributed * gradients) * 2**20)
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), sync_gradients=True)
    trained = Wrapped(model) if is_distributed else model
    plan = plan_of(accelerator, trained, sgd_plain(model), loader_of(None))
    assert plan.planned["gradients"] == pytest.approx(gradients)
    assert plan.planned["other"] == pytest.approx(5, abs=0.01)
    assert plan.total == pytest.approx(lasting + gradients + 5 + lasting, abs=0.01)
    assert plan.device_mib == 16 * 1024
