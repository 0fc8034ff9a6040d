"""Floating-point operations of a model, counted once on its real modules without computing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from common.data.batch import Samples
from common.models.compile import as_written

# A recipe's: takes the model and a batch; returns the loss, and the model's outputs.
ComputeLoss = Callable[[Any, Any], tuple[torch.Tensor, Any]]


class TrainingFlops(NamedTuple):
    """What a sample costs, forward and backward: a multiplication and an addition count as two.

    Matrix products grow with its real tokens, without padding, attention with their square.
    """

    per_sample: float
    per_token: float = 0.0
    per_squared_token: float = 0.0

    def total(self, samples: float, tokens: float, squared_tokens: float) -> float:
        counts = (samples, tokens, squared_tokens)
        return sum(cost * count for cost, count in zip(self, counts, strict=True))


def training_flops(model: nn.Module, compute_loss: ComputeLoss, samples: Samples) -> TrainingFlops:
    """Count on tensors that have shapes only; `model` without what wraps it for several processes.

    Recomputation under gradient checkpointing is not counted, and attention is counted as its
    two products: `torch.utils.flop_counter` does not see all fused ones.
    """
    # Where samples have lengths L: a + bL + cL² through three points.
    points = [0.0] if samples.lengths is None else [8.0, 16.0, 32.0]
    counts = [operations(model, compute_loss, samples.example(1, int(n))) for n in points]
    powers = torch.vander(torch.tensor(points, dtype=torch.float64), increasing=True)
    solved = torch.linalg.solve(powers, torch.tensor(counts, dtype=torch.float64))
    return TrainingFlops(*solved.tolist())


def operations(model: nn.Module, compute_loss: ComputeLoss, batch: Any) -> float:
    """Return the operations of one forward and backward pass on a batch on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }

    def on_meta(*inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(model, tensors, inputs, named)

    attention: Any = getattr(getattr(model, "config", None), "_attn_implementation", None)
    set_attention: Any = model.set_attn_implementation if attention else lambda name: None
    training = model.training
    try:
        set_attention("eager")
        model.eval()  # without recomputation
        with as_written(model), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            compute_loss(on_meta, batch)[0].backward()
    finally:
        model.train(training)
        set_attention(attention)
    return float(counter.get_total_flops())
