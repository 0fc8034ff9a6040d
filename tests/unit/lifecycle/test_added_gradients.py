"""A backward pass that adds to old gradients is noticed, whatever the loop does in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from common.lifecycle.added_gradients import AddedGradients


def backward(model: nn.Linear) -> None:
    """Run a backward pass through all parameters that are trained."""
    loss = model(torch.ones(3, 2)).sum()
    if loss.requires_grad:
        loss.backward()


def zero_in_place(model: nn.Linear) -> None:
    model.zero_grad(set_to_none=False)


def freeze(model: nn.Linear) -> None:
    """Freeze the model, as the other network's turn in adversarial training does."""
    model.requires_grad_(False)


def freeze_weight(model: nn.Linear) -> None:
    model.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("before_watching", "after_watching", "expected"),
    [
        (None, None, ["bias", "weight"]),
        (nn.Module.zero_grad, None, []),
        (zero_in_place, None, []),
        (None, nn.Module.zero_grad, []),
        (None, zero_in_place, []),
        (freeze, None, []),
        (None, freeze, []),
        (freeze_weight, None, ["bias"]),
        (None, freeze_weight, ["bias"]),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_only_gradients_that_are_added_up_count(
    before_watching: Callable[[nn.Linear], object] | None,
    after_watching: Callable[[nn.Linear], object] | None,
    expected: list[str],
    micro_batches: int,
) -> None:
    """Micro-batches of one update rightly add to the gradients of each other."""
    model = nn.Linear(2, 2)
    added = AddedGradients()
    backward(model)
    if before_watching is not None:
        before_watching(model)
    added.watch(dict(model.named_parameters()))
    if after_watching is not None:
        after_watching(model)
    for _ in range(micro_batches):
        backward(model)
    assert sorted(added.end()) == expected
    assert not added.hooks
    backward(model)
    assert sorted(added.names) == expected
