"""The network that is evaluated and exported, if the recipe passes one in a wrapper."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel

from common.lifecycle.evaluated_networks import network_to_evaluate


class Halved(AveragedModel):
    """An average with a forward pass of its own."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.module(images) / 2


def test_network_in_a_plain_average_is_evaluated() -> None:
    """Its weights have the model's names. An average that computes otherwise is left as it is."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    average = AveragedModel(model)
    halved = Halved(model)
    assert network_to_evaluate(accelerator, model) is model
    assert network_to_evaluate(accelerator, average) is average.module
    assert network_to_evaluate(accelerator, halved) is halved
