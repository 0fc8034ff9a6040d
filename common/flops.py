"""Floating-point operations of a model, counted once on its real modules without computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from common.loader import Batch, Samples

ComputeLoss = Callable[[Any, "Batch"], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TrainingFlops:
    """What one sample costs, forward and backward: a multiplication and an addition count as two.

    A transformer's matrix products grow with a sample's tokens, its attention with their square;
    real tokens are counted, so padding is not work done.
    """

    per_sample: float
    per_token: float = 0.0
    per_squared_token: float = 0.0

    def total(self, samples: float, tokens: float, squared_tokens: float) -> float:
        """Return the operations for so many samples, tokens, and squares of samples' tokens."""
        return (
            self.per_sample * samples
            + self.per_token * tokens
            + self.per_squared_token * squared_tokens
        )


def training_flops(model: nn.Module, compute_loss: ComputeLoss, samples: Samples) -> TrainingFlops:
    """Count with `torch.utils.flop_counter` on tensors that have shapes only (the meta device).

    Recomputation under gradient checkpointing is not counted, and attention is counted as its
    two products: the counter does not see all fused ones.

    Args:
        model: without what wraps it for several processes.
    """
    if not samples.lengths_vary:
        return TrainingFlops(count(model, compute_loss, samples.example(1, 0)))
    # a + bL + cL² through three points.
    lengths = torch.tensor([8.0, 16.0, 32.0], dtype=torch.float64)
    counts = [count(model, compute_loss, samples.example(1, int(n))) for n in lengths]
    powers = torch.stack([lengths**0, lengths, lengths**2], dim=1)
    solved = torch.linalg.solve(powers, torch.tensor(counts, dtype=torch.float64))
    return TrainingFlops(*solved.tolist())


def count(model: nn.Module, compute_loss: ComputeLoss, batch: Batch) -> float:
    """Return the operations of one forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    weights = {
        name: torch.empty_like(weight, device="meta").requires_grad_(weight.requires_grad)
        for name, weight in model.named_parameters()
    }
    buffers = {name: buffer.to("meta") for name, buffer in model.named_buffers()}

    def on_meta(*inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(model, {**weights, **buffers}, inputs, named)

    training, compiled = model.training, model._compiled_call_impl
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention is not None:
        model.set_attn_implementation("eager")  # type: ignore[operator]
    model.eval()  # without recomputation
    model._compiled_call_impl = None
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            compute_loss(on_meta, batch)[0].backward()
    finally:
        model.train(training)
        model._compiled_call_impl = compiled
        if attention is not None:
            model.set_attn_implementation(attention)  # type: ignore[operator]
    return float(counter.get_total_flops())
