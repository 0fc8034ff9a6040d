"""Restored networks, and the sums of bits by which ranks and checkpoints recognise weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from common.checkpoints.adapters import Network
from common.checkpoints.checksums import sums_of_bits

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_value_changes_the_sum_of_bits(dtype: torch.dtype) -> None:
    """This holds for any type and layout. An empty tensor has a sum, too."""
    values = torch.zeros(2, 3, dtype=dtype).t()
    same = values.clone()
    empty = torch.zeros(0, dtype=dtype)
    before = sums_of_bits({"values": values, "empty": empty})
    assert sums_of_bits({"values": same, "empty": empty}) == before
    values[1, 1] = 1
    assert sums_of_bits({"values": values})["values"] != before["values"]


def test_restored_network_keeps_the_order_of_its_frozen_parameters() -> None:
    """All ranks must add the sums of bits of sharded parameters in the same order.

    The order of a set of names would differ between processes.
    """
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))).requires_grad_(False)
    network = Network(model)
    names = list(network.frozen_checksums)
    values = dict(model.named_parameters())
    network.load_parameters(Path("step-00000001"), "model", frozen=values, trained={})
    assert list(network.frozen_checksums) == names
