"""What `run.keep` says about parts that are missing, or that were not prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel

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


@pytest.mark.parametrize("compiled", ["the model", "a layer"])
def test_wrapper_of_torch_compile_is_refused(compiled: str) -> None:
    """Such a wrapper would give the exported weights names that nothing else reads."""
    network: Any = nn.Sequential(nn.Linear(1, 1))
    if compiled == "the model":
        network = torch.compile(network)
    else:
        network[0] = torch.compile(network[0])
    context: Any = None
    with pytest.raises(UserError, match=r"the model that .* is wrapped"):
        keep(context, network, PARTS["optimizer"], {"model": network})


class OwnOptimizer:
    """An optimizer that is not torch's, so the Accelerator can't prepare it."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": [*model.parameters()], "lr": 0.1}]


class Wrapper(torch.optim.SGD):
    """An optimizer around one that the Accelerator has prepared."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups, lr=0.1)
        self.optimizer = optimizer


# What a recipe passes to `run.keep`, by what it passes to `accelerator.prepare`, and the part that
# is refused, if any.
CASES: dict[str, tuple[Any, str | None]] = {
    "all": (lambda prepare, model, sgd: dict(zip(PARTS, prepare(model, sgd), strict=False)), None),
    "nothing": (lambda prepare, model, sgd: {"model": model, "optimizer": sgd}, "model"),
    "only the model": (
        lambda prepare, model, sgd: {"model": prepare(model), "optimizer": sgd},
        "optimizer",
    ),
    "only the optimizer": (
        lambda prepare, model, sgd: {"model": model, "optimizer": prepare(sgd)},
        "model",
    ),
    "an average of the model": (
        lambda prepare, model, sgd: {
            "model": AveragedModel(model),
            "network": prepare(model),
            "optimizer": prepare(sgd),
        },
        "model",
    ),
    "a model in a larger one": (
        lambda prepare, model, sgd: {
            "model": nn.Sequential(prepare(model), nn.ReLU()),
            "network": model,
            "optimizer": prepare(sgd),
        },
        None,
    ),
    "an optimizer in a wrapper": (
        lambda prepare, model, sgd: {
            "model": prepare(model),
            "inner": (inner := prepare(sgd)),
            "optimizer": Wrapper(inner),
        },
        None,
    ),
    "a model with an own optimizer": (
        lambda prepare, model, sgd: {"model": prepare(model), "optimizer": OwnOptimizer(model)},
        None,
    ),
}


@pytest.mark.parametrize("prepared", CASES)
@pytest.mark.usefixtures("own_accelerator")
def test_model_and_optimizer_must_be_prepared(prepared: str) -> None:
    """Otherwise a run on one process would ignore the precision and the accumulation."""
    accelerator = Accelerator(cpu=True)
    make_parts, refused = CASES[prepared]
    model = nn.Linear(1, 1)
    parts = make_parts(accelerator.prepare, model, torch.optim.SGD(model.parameters(), lr=0.1))
    context: Any = SimpleNamespace(
        accelerator=accelerator, parts=SimpleNamespace(add=lambda *_, **__: None)
    )
    if refused is None:
        assert keep(context, parts["model"], parts["optimizer"], parts).model is parts["model"]
        return
    with pytest.raises(UserError) as raised:
        keep(context, parts["model"], parts["optimizer"], parts)
    assert raised.value.problem.startswith(f"the {refused} that run.keep(...) got is not prepared")
    assert "accelerator.prepare(model, optimizer, scheduler)" in raised.value.advice
