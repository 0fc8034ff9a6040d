"""Computes networks in float64, in which rounding stays too small to matter.

In fp32, rounding can move the input of a ReLU to the other side of zero. In a ResNet-18 on images
of 8 × 8, where batch norm sees 16 values of a channel, that changed the gradients of 16 of 36
updates by 0.05 to 1.3 %, and two runs that should be equal then moved apart: within six updates,
their losses differed by up to 8 %. In float64, rounding is smaller by a factor of 500 million.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as tree

from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.run import Run
from common.tools.prove.observation.session import Session
from common.training.sharding.accelerator import ShardingAccelerator


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    session.wrap(ShardingAccelerator, "prepare_model", prepare_in_float64)
    session.wrap(Run, "keep", keep_in_float64)
    session.wrap(Loader, "epoch", batches_in_float64)
    session.wrap(Loader, "evaluation_batches", batches_in_float64)


def prepare_in_float64(
    original: Callable[..., nn.Module],
    accelerator: ShardingAccelerator,
    model: nn.Module,
    *positional: object,
    **named: object,
) -> nn.Module:
    """Convert a network before it is prepared.

    The parameters are converted in place, so an optimizer that was made earlier still has them.
    """
    # FSDP2 computes in the dtype of the parameters, but it would reduce gradients in fp32.
    sharder = accelerator.sharder
    if sharder is not None:
        sharder.precision = dataclasses.replace(sharder.precision, reduce_dtype=torch.float64)
    model.double()
    model.register_forward_pre_hook(with_float64_inputs, with_kwargs=True)
    return original(accelerator, model, *positional, **named)


def keep_in_float64(original: Callable[..., None], run: Run, **parts: object) -> None:
    """Convert kept networks that were not prepared, such as an average of the weights."""
    for part in parts.values():
        if isinstance(part, nn.Module):
            part.double()
    original(run, **parts)


def batches_in_float64(
    original: Callable[..., BatchesWithWork],
    loader: Loader,
    *positional: object,
    **named: object,
) -> BatchesWithWork:
    """Yield the batches of a loader with their targets and other numbers in float64."""
    for batch, work in original(loader, *positional, **named):
        yield tree.tree_map(to_float64, batch), work


def with_float64_inputs(
    module: nn.Module, positional: tuple[object, ...], named: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the inputs of a network with all floating-point tensors in float64."""
    return tree.tree_map(to_float64, (positional, named))  # type: ignore[no-any-return]


def to_float64(value: object) -> object:
    """Return a floating-point tensor in float64, and any other value as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value
