"""Counts the operations of a forward pass with the recipes' own counter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from benchmarks.accuracy.records import ForwardCost
from common.data.samples import Batch, Samples
from common.measure.flops import (
    ComputeLoss,
    TrainingFlops,
    count_operations,
    parabola_through,
    stand_ins_of_tensors,
    training_flops,
    with_values,
)

LENGTHS = (8, 16, 32)  # tokens; three are enough for a parabola


def forward_alone(compute_loss: ComputeLoss) -> ComputeLoss:
    """Return a loss whose backward pass has no operations, so that the counter sees one pass."""

    def compute(model: object, batch: object) -> tuple[torch.Tensor, object]:
        with torch.no_grad():
            _, outputs = compute_loss(model, batch)
        return torch.zeros((), requires_grad=True), outputs

    return compute


def cost_of_recipe(model: nn.Module, compute_loss: ComputeLoss, samples: Samples) -> ForwardCost:
    """Return the cost of a recipe's model on its own samples.

    Args:
        model: without a wrapper for several processes.
    """
    return as_cost(training_flops(model, forward_alone(compute_loss), samples))


def cost_of_peer(
    model: nn.Module, compute_loss: ComputeLoss, batches: Mapping[float, Batch]
) -> ForwardCost:
    """Return the cost of a peer's model.

    Args:
        batches: of one sample each, by the sample's length in tokens; of images one, by 0.
    """
    compute = forward_alone(compute_loss)
    counts = {
        length: count_operations(model, compute, batch, stand_ins_of_tensors(model, with_values))
        for length, batch in batches.items()
    }
    return as_cost(parabola_through(counts))


def as_cost(flops: TrainingFlops) -> ForwardCost:
    """Return operations of one forward pass as a record."""
    return ForwardCost(flops.per_sample, flops.per_token, flops.per_squared_token)


def image_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a peer's loss and logits on images."""
    logits = model(batch["images"])
    return nn.functional.cross_entropy(logits, batch["labels"]), logits


def text_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a peer's loss and logits on tokens."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(logits, batch["labels"]), logits


def image_batch(shape: tuple[int, int, int]) -> dict[float, Batch]:
    """Return one image of zeros, [1, channels, height, width], for `cost_of_peer`."""
    label = torch.zeros(1, dtype=torch.int64)
    return {0.0: {"images": torch.zeros(1, *shape), "labels": label}}


def text_batches() -> dict[float, Batch]:
    """Return one text of each of `LENGTHS`, for `cost_of_peer`."""
    label = torch.zeros(1, dtype=torch.int64)
    return {
        float(length): {
            "input_ids": torch.ones(1, length, dtype=torch.int64),
            "attention_mask": torch.ones(1, length, dtype=torch.int64),
            "labels": label,
        }
        for length in LENGTHS
    }
