"""The instrument that computes networks in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from common.tools.prove.instruments.in_float64 import (
    batches_in_float64,
    keep_in_float64,
    prepare_in_float64,
)


class Scaled(nn.Module):
    """A linear layer and a batch norm, whose inputs are nested and of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, batch: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
        """Return float64 [rows, 4]."""
        assert batch["labels"].dtype == torch.int64
        return self.norm(self.layer(batch["rows"][0])) * scale  # type: ignore[no-any-return]


class Accelerator:
    """Stands in for the run's Accelerator."""

    def __init__(self) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        self.sharder = SimpleNamespace(precision=policy)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model


def test_networks_and_their_copies_compute_in_float64() -> None:
    """The optimizer made before updates the same parameters, and keeps its state in float64."""
    torch.manual_seed(0)
    bare = Scaled()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.1)
    accelerator: Any = Accelerator()
    model = prepare_in_float64(Accelerator.prepare_model, accelerator, bare)
    assert accelerator.sharder.precision.reduce_dtype == torch.float64
    batch = {"rows": [torch.randn(5, 3)], "labels": torch.zeros(5, dtype=torch.int64)}
    before = bare.layer.weight.detach().clone()
    for network in (model, copy.deepcopy(model)):
        output = network(batch, scale=torch.ones(1))
        assert output.dtype == torch.float64
    model(batch, scale=torch.ones(1)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(bare.layer.weight, before)
    assert bare.norm.running_mean is not None
    assert bare.norm.running_mean.dtype == torch.float64
    states = [*optimizer.state.values()]
    assert len(states) == 4
    assert all(state["exp_avg"].dtype == torch.float64 for state in states)


def test_kept_networks_and_batches_are_in_float64() -> None:
    """Other parts, and numbers that are not floating-point, stay as they are."""
    average = nn.Linear(2, 2)
    kept: dict[str, Any] = {}
    run: Any = None
    keep_in_float64(lambda run, **parts: kept.update(parts), run, ema=average, scheduler=None)
    assert kept == {"ema": average, "scheduler": None}
    assert average.weight.dtype == torch.float64
    batch = {"rows": torch.ones(2), "labels": torch.ones(2, dtype=torch.int64), "names": ["a", "b"]}
    loader: Any = None
    ((converted, work),) = batches_in_float64(lambda loader: iter([(batch, None)]), loader)  # type: ignore[list-item]
    assert work is None
    assert converted["rows"].dtype == torch.float64
    assert converted["labels"] is batch["labels"]
    assert converted["names"] == ["a", "b"]
