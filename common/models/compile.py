"""`--compile`: compiles a whole model or its layers with torch.compile."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from common.config import TrainingConfig
from common.console import say
from common.errors import UserError
from common.system.devices import can_launch_graphs, default_device, has_compiler, is_accelerator
from common.system.launch_variables import world_size


def compile_model(model: nn.Module, config: TrainingConfig) -> None:
    """Set a model up, in place, to be compiled at its first call.

    All batches should have one shape, because torch compiles the model again for each other shape.

    On CUDA, the model is compiled with CUDA graphs, which launch all kernels of a small model at
    once. There are two exceptions:

    - Under accumulation, the graph of the next micro-batch would overwrite the gradients that
      accumulation adds to (https://github.com/pytorch/pytorch/issues/169545).
    - CUDA graphs have not been tried with several processes (DDP).

    Raises:
        UserError: torch compiles nothing for the device.
    """
    refuse_device_without_compiler()
    # `--auto-batch-size` may choose accumulation later.
    accumulates = config.gradient_accumulation_steps > 1 or config.auto_batch_size
    device_has_graphs = can_launch_graphs(default_device())
    uses_graphs = device_has_graphs and not accumulates and world_size() == 1
    if device_has_graphs and not uses_graphs:
        say(
            "--compile does not use CUDA graphs, which need one process, no accumulation and no "
            "--auto-batch-size"
        )
    model.compile(dynamic=False, mode="reduce-overhead" if uses_graphs else None)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Set layers of one class up, in place, to be compiled once for sequences of any length.

    This is PyTorch's regional compilation: all layers share the compiled code.

    Raises:
        UserError: torch compiles nothing for the device.
    """
    refuse_device_without_compiler()
    for layer in layers:
        layer.compile(dynamic=True)


def refuse_device_without_compiler() -> None:
    """Raise a `UserError` if torch.compile does not support the current accelerator.

    A CPU is never refused.
    """
    device = default_device()
    if is_accelerator(device) and not has_compiler(device):
        raise UserError(
            f"torch.compile does not support {device.type}",
            advice=(
                "leave --compile out; on a resume, which keeps the flag, use a device that "
                "torch.compile supports"
            ),
        )


def as_written(model: nn.Module) -> AbstractContextManager[None]:
    """Run a compiled model without its compiled code, within the block.

    Evaluations use this context, because compiling the model for them would take longer than it
    saves.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def is_compiled(model: nn.Module) -> bool:
    """Whether a model, or a layer of it, is set up to be compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())
