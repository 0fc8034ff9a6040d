"""`--compile`: torch.compile, in the way that pays for each model, and how long it took."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from common.config import TrainingConfig


def compile_model(model: nn.Module, config: TrainingConfig) -> None:
    """Compile a model whose batches all have one shape, in place, when it is first called.

    On CUDA with CUDA graphs: one launch for all of a small model's kernels (not tried: no GPU). Not
    under accumulation, which adds to gradients that the next micro-batch's graph writes over
    (https://github.com/pytorch/pytorch/issues/169545).
    """
    accumulates = config.gradient_accumulation_steps > 1 or config.auto_batch_size
    graphs = torch.cuda.is_available() and not accumulates
    model.compile(dynamic=False, mode="reduce-overhead" if graphs else None)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile layers that are all alike, each by itself, for batches of any length.

    They share their code, which is compiled once: regional compilation, which shortens the first
    update (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
    """
    for layer in layers:
        layer.compile(dynamic=True)


def as_written(model: nn.Module) -> AbstractContextManager[None]:
    """Run a compiled model as it was written, for a while.

    An evaluation is another mode and has a smaller last batch: each would be compiled anew, which
    takes longer than most evaluations.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of a model is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def compile_seconds() -> float:
    """Return how long this process has spent compiling models so far; 0 where it never did."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils.calculate_time_spent()["total_wall_time"] if utils else 0.0
