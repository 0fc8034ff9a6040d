"""Learning rates by update: warm-up, then decay. Also which parameters have weight decay."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from common.config import TrainingConfig
from common.errors import UserError
from common.training.optim import SCALES, SCHEDULES, decay_groups, warmup_decay
from common.training.plan import Plan


def test_schedule_flag_offers_every_schedule() -> None:
    """The flag's choices are the keys of the table of schedules."""
    assert get_args(get_type_hints(TrainingConfig)["schedule"]) == tuple(SCHEDULES)


@pytest.mark.parametrize(("rule", "factor"), [("no", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_learning_rate_scales_with_the_effective_batch(rule: str, factor: float) -> None:
    """The base is the flag's value or the recipe's batch, and each group keeps its own peak."""
    assert get_args(get_type_hints(TrainingConfig)["scale_learning_rate"]) == tuple(SCALES)
    order = SimpleNamespace(updates_per_epoch=10, global_batch=1024)
    for config in (
        TrainingConfig(scale_learning_rate=rule, batch_size=64),  # the default is 128
        TrainingConfig(scale_learning_rate=rule, batch_size=64, base_batch_size=128),
    ):
        plan = Plan(config, order, "some", {"other": 2})
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.25)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        scheduler = plan.schedule(optimizer, warmup_share=0.1)
        assert plan.facts().rate_scale == pytest.approx(factor)
        assert plan.facts().warmup_steps == 2
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([0.5 * factor, 0.25 * factor])


def rates(shape: str, total: int, warmup: int, steps: int) -> list[float]:
    """Return the rates of the first `steps` updates, at a peak of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = warmup_decay(optimizer, total, warmup, shape)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_linear_rises_and_falls() -> None:
    """The schedule rises and falls evenly, and no update has a rate of 0."""
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates("linear", 10, 4, 10) == pytest.approx(expected)


def test_cosine_falls_along_a_cosine() -> None:
    """The peak follows the warm-up, and half of it is reached midway."""
    values = rates("cosine", 12, 2, 12)
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert values[7] == pytest.approx(0.5)
    assert values[-1] == pytest.approx(0.5 - 0.5 * math.cos(math.pi / 10))
    assert values[2:] == sorted(values[2:], reverse=True)


def test_constant_stays_at_its_peak() -> None:
    """The warm-up is the same as in other schedules."""
    assert rates("constant", 6, 2, 8) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1])


def test_schedule_refuses_a_group_that_was_added_later() -> None:
    """Torch's own error speaks of the lengths of two lists."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = warmup_decay(optimizer, 10, 0, "linear")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.step()
    with pytest.raises(
        UserError, match=r"SGD has 2 parameter groups but had 1 .* examples/freezing\.py"
    ):
        scheduler.step()


@pytest.mark.parametrize("shape", [*SCHEDULES])
@pytest.mark.parametrize(("total", "warmup"), [(5, 0), (1, 0), (3, 3), (2, 9)])
def test_short_runs_have_valid_rates(shape: str, total: int, warmup: int) -> None:
    """Warm-up may be absent or longer than the run. Each rate lies between 0 and 1."""
    values = rates(shape, total, warmup, total + 3)
    assert all(0 <= rate <= 1 for rate in values)
    assert all(rate > 0 for rate in values[:total])
    if warmup == 0:
        assert values[0] == 1
        assert values[total:] == [1.0 if shape == "constant" else 0.0] * 3


def test_matrices_decay_and_vectors_do_not() -> None:
    """Biases and norms have no weight decay, and frozen weights are left out."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model[3].weight.requires_grad = False
    decaying, others = decay_groups(model, 0.3)
    assert decaying["weight_decay"] == 0.3
    assert others["weight_decay"] == 0
    assert [tuple(p.shape) for p in decaying["params"]] == [(4, 3, 3, 3)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (4,), (2,)]
    (every,) = decay_groups(model, 0.0)
    assert len(every["params"]) == 5
