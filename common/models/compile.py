"""`--compile`: torch.compile, in the way that pays for each model, and how long it took."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from common.config import TrainingConfig
from common.console import say
from common.devices import default_device, has_compiled_graphs, has_compiler, is_accelerator
from common.errors import UserError
from common.machine import world_size


def compile_model(model: nn.Module, config: TrainingConfig) -> None:
    """Compile a model whose batches all have one shape, in place, when it is first called.

    On CUDA with CUDA graphs: one launch for all of a small model's kernels (not tried: no GPU). Not
    under accumulation, which adds to gradients that the next micro-batch's graph writes over
    (https://github.com/pytorch/pytorch/issues/169545), and not under DDP, until that was tried.

    Raises:
        UserError: torch compiles nothing for the device.
    """
    refuse_device_without_compiler()
    accumulates = config.gradient_accumulation_steps > 1 or config.auto_batch_size
    device_has_graphs = has_compiled_graphs(default_device())
    graphs = device_has_graphs and not accumulates and world_size() == 1
    if device_has_graphs and not graphs:
        say("--compile: without CUDA graphs, which need one process and no accumulation")
    model.compile(dynamic=False, mode="reduce-overhead" if graphs else None)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile layers that are alike once, for any length: PyTorch's regional compilation.

    Raises:
        UserError: torch compiles nothing for the device.
    """
    refuse_device_without_compiler()
    for layer in layers:
        layer.compile(dynamic=True)


def refuse_device_without_compiler() -> None:
    device = default_device()
    if is_accelerator(device) and not has_compiler(device):
        raise UserError(f"torch.compile makes no kernels for {device.type}: leave out --compile")


def as_written(model: nn.Module) -> AbstractContextManager[None]:
    """Run a compiled model as written: to compile it for evaluations too would take longer."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def compile_seconds() -> float:
    """Return how long this process has spent compiling models so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils.calculate_time_spent()["total_wall_time"] if utils else 0.0
