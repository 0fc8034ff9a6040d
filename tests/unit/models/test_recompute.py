"""`--gradient-checkpointing`: it keeps less memory and changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from common.measure.memory_plan import saved_storages
from common.models.recompute import recompute
from recipes.resnet import ResNet


class Counting(nn.Module):
    """A layer whose output depends on how often it was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a function of the values and both buffers, and update the buffers."""
        if self.training:
            self.calls += 1
            self.mean.lerp_(values.detach().float().mean(0), 1 / self.calls)
        return torch.sin(values * self.calls + self.mean)


def mlp() -> nn.Sequential:
    """Return layers with batch norm over vectors, and with dropout, which draws."""
    layers = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(*layers, nn.Linear(16, 16))


def convolutions() -> nn.Sequential:
    """Return layers with batch norm over images, in a nested block."""
    block = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), block, nn.Conv2d(8, 1, 1), nn.Flatten())


def counting() -> nn.Sequential:
    """Return layers whose output depends on a buffer, and one buffer that is not saved."""
    return nn.Sequential(nn.Linear(16, 16), Counting(), nn.Linear(16, 16))


class Stages(nn.Module):
    """Two stages, each of which may be recomputed."""

    def __init__(self, stage: nn.Module, gradient_checkpointing: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList([stage, copy.deepcopy(stage)])
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the stages as the recipes do."""
        for stage in self.stages:
            values = recompute(stage, values) if self.gradient_checkpointing else stage(values)
        return values


def trained(
    model: nn.Module, dtype: torch.dtype, *, backwards: int = 1
) -> tuple[list[torch.Tensor], int]:
    """Return weights and buffers after five updates, and the bytes that a forward pass keeps."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        images = torch.randn(32, 16)
        with (
            saved_storages(model.parameters()) as sizes,
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        ):
            loss = model(images).float().square().mean()
        for number in range(backwards):
            loss.backward(retain_graph=number < backwards - 1)
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers()], sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [mlp, convolutions, counting])
@pytest.mark.parametrize("backwards", [1, 2])
def test_recomputing_changes_no_bit(
    make: Callable[[], nn.Module], dtype: torch.dtype, backwards: int
) -> None:
    """Weights, statistics and counters equal those of a model that keeps its activations."""
    torch.manual_seed(1)
    stage = make()
    models = [Stages(copy.deepcopy(stage), flag) for flag in (False, True)]
    kept, most = trained(models[0], dtype, backwards=backwards)
    recomputed, least = trained(models[1], dtype, backwards=backwards)
    assert len(kept) == len(recomputed)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))
    assert least < most


def test_resnet_counts_each_batch_once() -> None:
    """The recipe's nested blocks keep their statistics as without recomputation."""
    models = []
    for flag in (False, True):
        torch.manual_seed(1)
        model = ResNet("resnet18", 1, 3, 10)
        model.gradient_checkpointing = flag
        models.append(nn.Sequential(nn.Unflatten(1, (1, 4, 4)), model))
    kept, most = trained(models[0], torch.float32)
    recomputed, least = trained(models[1], torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))
    assert models[1][1].layer4[1].bn1.num_batches_tracked == 5  # type: ignore[index]
    assert least < most


def test_compiled_model_counts_each_batch_once() -> None:
    """Compiled code recomputes in its own way."""
    torch.manual_seed(1)
    stage = convolutions()
    models = [Stages(copy.deepcopy(stage), flag) for flag in (False, True)]
    for model in models:
        model.compile(backend="aot_eager", fullgraph=True)
    kept, recomputed = (trained(model, torch.float32)[0] for model in models)
    for value, recomputed_value in zip(kept, recomputed, strict=True):
        assert torch.allclose(value, recomputed_value, rtol=1e-4, atol=1e-6)
