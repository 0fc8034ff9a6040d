"""Counting operations of models whose tensors or modules have several names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from common.data.samples import TensorSamples
from common.measure.flops import training_flops, training_flops_of_real_samples

SIZE = 6
CLASSES = 6


class Model(nn.Module):
    """Two layers: [batch, SIZE] to [batch, CLASSES]."""

    def __init__(self, sharing: str) -> None:
        super().__init__()
        self.body = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, CLASSES)
        self.register_buffer("scale", torch.ones(SIZE))
        if sharing == "module":
            self.another_name = self.head
        elif sharing == "weight":
            self.head.weight = self.body.weight
        elif sharing == "name":
            self.weight_of_head = self.head.weight
        elif sharing == "buffer":
            self.head.register_buffer("scale", self.scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(rows * self.scale))


def compute_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["rows"])
    return logits.square().mean(), logits


@pytest.mark.parametrize("sharing", ["nothing", "module", "weight", "name", "buffer"])
@pytest.mark.parametrize("count", [training_flops, training_flops_of_real_samples])
def test_counting_operations_leaves_the_model_unchanged(sharing: str, count: Any) -> None:
    """Tensors stay the same, and sharing does not change the count."""
    model = Model(sharing)
    samples = TensorSamples(rows=torch.randn(8, SIZE))
    before = model.state_dict(keep_vars=True)
    device = [torch.device("cpu")] if count is training_flops_of_real_samples else []
    per_sample = count(model, compute_loss, samples, *device).per_sample
    # Both layers count forward and the weights' gradients, the second also its input's gradient.
    assert per_sample == 2 * SIZE * (2 * SIZE + 3 * CLASSES)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(torch.randn(2, SIZE)).device.type == "cpu"
