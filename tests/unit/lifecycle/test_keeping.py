"""What `run.keep` says about parts that are missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.lifecycle.keeping import keep
from common.run import Run

MODEL = nn.Linear(1, 1)
PARTS = {
    "model": MODEL,
    "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1),
    "scheduler": None,
}


@pytest.mark.parametrize("missing", ["model", "optimizer"])
@pytest.mark.parametrize("is_left_out", [True, False], ids=["left out", "None"])
def test_a_missing_part_is_named(missing: str, is_left_out: bool) -> None:
    """A part that each run has may neither be left out nor be None."""
    run: Any = SimpleNamespace(context=None, stages=SimpleNamespace())
    parts: Any = {name: part for name, part in PARTS.items() if name != missing}
    if not is_left_out:
        parts[missing] = None
    with pytest.raises(UserError) as raised:
        Run.keep(run, **parts)
    assert f"run.keep(...) got no {missing}" in raised.value.message
    assert f"as {missing}=..." in raised.value.message


def test_the_model_is_named_first() -> None:
    context: Any = None
    with pytest.raises(UserError, match="got no model"):
        keep(context, None, None, {})
