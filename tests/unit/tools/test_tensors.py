"""Tensors of two runs, compared by their bits."""

from __future__ import annotations

import torch

from common.tools.tensors import first_differing_tensor


def test_tensors_are_compared_by_their_bits() -> None:
    first = {"a": torch.tensor([0.0, float("nan")]), "b": torch.ones(2, dtype=torch.bfloat16)}
    same = {name: tensor.clone() for name, tensor in first.items()}
    assert first_differing_tensor(first, same) is None
    negative_zero = {**same, "a": torch.tensor([-0.0, float("nan")])}
    assert first_differing_tensor(first, negative_zero) is not None
    other = {**same, "b": torch.tensor([1.0, 1.5], dtype=torch.bfloat16)}
    assert first_differing_tensor(first, other) == "1 of 2 tensors differ, b by up to 0.5"
    assert first_differing_tensor(first, {"a": first["a"]}) == "only one of the runs has b"
    empty = {"a": torch.ones(0)}
    assert first_differing_tensor(empty, {"a": torch.ones(0, dtype=torch.bfloat16)}) is not None
