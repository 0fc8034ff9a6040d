"""Names of learning rates, for all parameter groups and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from common.track.names import metric_named
from common.training.optim import warmup_decay
from common.training.rates import learning_rates


def groups(*options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return groups of one parameter each."""
    return [{"params": [nn.Parameter(torch.zeros(1))], **group} for group in options]


def test_groups_that_differ_are_logged_by_name_or_number() -> None:
    """A group with the rate of the first group has no curve of its own."""
    parameter_groups = groups(
        {"lr": 0.1},
        {"lr": 0.1},
        {"lr": 0.2},
        {"lr": 0.3, "name": "head"},
        {"lr": 0.4, "name": "head"},
    )
    assert learning_rates({"optimizer": torch.optim.SGD(parameter_groups)}) == {
        "train/learning_rate": 0.1,
        "train/learning_rate/2": 0.2,
        "train/learning_rate/head": 0.3,
        "train/learning_rate/head-4": 0.4,
    }


def test_further_optimizers_are_logged_by_their_name() -> None:
    """The names of their groups follow."""
    optimizers = {
        "optimizer": torch.optim.SGD(groups({"lr": 0.1})),
        "optimizer_d": torch.optim.AdamW(groups({"lr": 0.1}, {"lr": 0.5, "name": "head"})),
    }
    assert learning_rates(optimizers) == {
        "train/learning_rate": 0.1,
        "train/learning_rate/optimizer_d": 0.1,
        "train/learning_rate/optimizer_d/head": 0.5,
    }


def test_logged_names_do_not_change_during_training() -> None:
    """Even when a schedule brings all rates to 0, the same names are logged."""
    optimizer = torch.optim.SGD(groups({"lr": 0.1}, {"lr": 0.2}))
    scheduler = warmup_decay(optimizer, total_steps=2, warmup_steps=0, schedule="linear")
    names = [*learning_rates({"optimizer": optimizer})]
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert learning_rates({"optimizer": optimizer}) == dict.fromkeys(names, 0.0)
    assert len(names) == 2


def test_rates_have_a_label_and_a_panel() -> None:
    """Rates of groups have the label and panel of `train/learning_rate`, plus the group."""
    for group in ("head", "1", "optimizer_d/1"):
        metric = metric_named(f"train/learning_rate/{group}")
        assert metric.label == f"learning rate, {group}"
        assert metric.panel == metric_named("train/learning_rate").panel
        assert metric.text(0.00012345) == "0.000123"


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer whose learning rate has another name, as in some published ones."""

    def __init__(self, parameters: list[dict[str, Any]]) -> None:
        super().__init__(parameters, {"step_size": 0.1})


def test_group_without_a_rate_is_left_out() -> None:
    """Some optimizers have no rate, or compute it, as Adafactor with `lr=None` does."""
    assert learning_rates({"optimizer": OwnOptimizer(groups({}, {}))}) == {}
    optimizer = torch.optim.SGD(groups({"lr": 0.1}, {"lr": 0.2}))
    optimizer.param_groups[0]["lr"] = None
    assert learning_rates({"optimizer": optimizer}) == {"train/learning_rate/1": 0.2}
