"""`--compile`: torch.compile, in the way that pays for each model, and how long it took."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def compile_model(model: nn.Module) -> None:
    """Compile a model whose batches all have one shape, in place, when it is first called.

    On CUDA with CUDA graphs: one launch for all of a small model's kernels (not tried: no GPU).
    """
    mode = "reduce-overhead" if torch.cuda.is_available() else None
    model.compile(dynamic=False, mode=mode)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile layers that are all alike, each by itself, for batches of any length.

    They share their code, which is compiled once: regional compilation, which shortens the first
    update (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
    """
    for layer in layers:
        layer.compile(dynamic=True)


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of a model is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def compile_seconds() -> float:
    """Return how long this process has spent compiling models so far; 0 where it never did."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils.calculate_time_spent()["total_wall_time"] if utils else 0.0
