"""Checksums of tensors, to see whether they have changed, or differ between ranks."""

from collections.abc import Iterable

import torch

from common.checkpoints.pack import Tensors
from common.checkpoints.shards import is_sharded, local

# The integer type of an element's width in bytes, to read the element's bits.
INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of_bits(tensors: Tensors) -> dict[str, int]:
    """Return a checksum of each tensor by name, to see whether the tensor has changed.

    The bits of each element are read as an integer as wide as the element, and the integers are
    added. A sum of the values themselves could hide a small change by rounding. The checksum of a
    sharded tensor is that of all ranks' rows. So all ranks must call this function, with the
    tensors in the same order.
    """
    if not tensors:
        return {}
    sums = local_sums_of_bits(tensors.values())
    # The sums of unsharded tensors are multiplied by the number of ranks, which does no harm: such
    # a tensor has changed on all ranks or on none.
    if any(map(is_sharded, tensors.values())):
        torch.distributed.all_reduce(sums)
    return dict(zip(tensors, sums.tolist(), strict=True))


def local_sums_of_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the checksum of `sums_of_bits` for this rank's part of each tensor: int64 [tensors].

    `tensors` must not be empty.
    """
    parts = [local(value.detach()) for value in tensors]
    # Split complex numbers into their two parts, because no integer type is as wide as complex128.
    real_parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return torch.stack([sum_of_bits(part) for part in real_parts])


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a real tensor's elements, each read as an integer: int64 []."""
    return tensor.view(INTEGER_TYPES[tensor.element_size()]).sum()
