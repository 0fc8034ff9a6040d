"""Compares the tensors of two runs bit by bit."""

from collections.abc import Mapping

import torch


def first_differing_tensor(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> str | None:
    """Return a phrase on the first tensor that differs; None if all bits are equal.

    The phrase says how many tensors differ, and gives the largest difference in the first of them.
    That is 0 if only its dtype or the sign of a zero differs.
    If only one run has a tensor, the phrase names that tensor instead. If the first differing
    tensors have different shapes, the phrase gives both shapes.
    """
    if first.keys() != second.keys():
        names = sorted(first.keys() ^ second.keys())
        return f"only one of the runs has {names[0]}"
    differing = [name for name, tensor in first.items() if not have_same_bits(tensor, second[name])]
    if not differing:
        return None
    name = differing[0]
    if first[name].shape != second[name].shape:
        return f"{name} has the shapes {tuple(first[name].shape)} and {tuple(second[name].shape)}"
    differences = first[name].double() - second[name].double()
    largest = differences.abs().max().item() if differences.numel() > 0 else 0.0
    return f"{len(differing)} of {len(first)} tensors differ, {name} by up to {largest:.2g}"


def have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits.

    By their bits, a NaN equals the same NaN, and 0.0 differs from -0.0.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(raw_bytes(first), raw_bytes(second))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, as uint8 [bytes].

    On the tensors themselves, `torch.equal` would compare values instead of bits.
    """
    return tensor.contiguous().reshape(-1).view(torch.uint8)
