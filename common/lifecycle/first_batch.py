"""Warns of the first training batch if it has values that are NaN.

Such values make the loss NaN, and the error that follows can't say where they came from.
"""

from collections.abc import Iterator, Mapping

import torch

from common.console import warn
from common.data.samples import Batch


def warn_of_nan(batch: Batch) -> None:
    """Print a warning that names the tensors of a batch with NaN; this waits for the device.

    Each rank prints its own, because perhaps the batch of one rank alone has such values.
    """
    names = [name for name, tensor in named_tensors(batch, "batch") if has_nan(tensor)]
    if names:
        warn(
            f"the first training batch has NaN in {', '.join(names)}, for example from missing "
            "cells of a table: unless the model replaces them, the loss becomes NaN as well",
            every_rank=True,
        )


def named_tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, as ``batch['images']`` for example.

    Args:
        name: what the value is called.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]")


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether a tensor of real numbers has NaN."""
    return tensor.is_floating_point() and bool(tensor.isnan().any())
