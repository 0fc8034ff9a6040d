"""Compares the tensors of two runs bit by bit."""

from collections.abc import Mapping

import torch


def first_differing_tensor(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> str | None:
    """Return a phrase that says how many tensors differ, and by how much; None for equal bits."""
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
    largest = differences.abs().max().item()
    return f"{len(differing)} of {len(first)} tensors differ, {name} by up to {largest:.2g}"


def have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits. So a NaN equals the same NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(raw_bytes(first), raw_bytes(second))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
