"""The digest of initial weights: what changes it, and the models that have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.lifecycle.start import initial_digest
from common.lifecycle.start.initial_digest import digest_of_model


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the same model in each call, with a buffer without dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_is_of_names_and_bytes(dtype: torch.dtype) -> None:
    """The last bit of one value changes it, and so does a buffer."""
    first = digest_of_model(model(dtype))
    assert first is not None
    assert digest_of_model(model(dtype)) == first
    changed = model(dtype)
    with torch.no_grad():
        changed[0].weight[1, 2].nextafter_(torch.tensor(9.0, dtype=dtype))  # type: ignore[index]
    assert digest_of_model(changed) != first
    counted = model(dtype)
    counted[1].num_batches_tracked += 1  # type: ignore[operator, index]
    assert digest_of_model(counted) != first
    assert digest_of_model(nn.ModuleDict({"renamed": model(dtype)})) != first


def test_digest_does_not_depend_on_the_layout() -> None:
    """The same values may lie in another order in memory."""
    convolution = nn.Conv2d(3, 4, 3)
    first = digest_of_model(convolution)
    assert digest_of_model(convolution.to(memory_format=torch.channels_last)) == first  # type: ignore[call-overload]


def test_some_models_have_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose weights do not exist yet, and large ones."""
    assert digest_of_model(nn.LazyLinear(3)) is None
    with torch.device("meta"):
        assert digest_of_model(nn.Linear(3, 4)) is None
    monkeypatch.setattr(initial_digest, "MAX_BYTES", 8)
    assert digest_of_model(model()) is None
