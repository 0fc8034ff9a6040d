"""How often a run logs and evaluates, where no flag says."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UserError
from common.training.plan import MOST_EVALUATIONS, MOST_ROWS, Plan
from recipes.mnist_mlp import Config


def plan_of(epochs: int, updates_per_epoch: int, **flags: Any) -> Plan:
    """Return the plan of a run of so many updates."""
    order = SimpleNamespace(updates_per_epoch=updates_per_epoch, global_batch=8)
    return Plan(Config(epochs=epochs, **flags), order, "digits", {})


def steps(plan: Plan, due: Any) -> list[int]:
    """Return the updates after which something is due."""
    return [step for step in range(1, plan.total_steps + 1) if due(step)]


@pytest.mark.parametrize(
    ("epochs", "updates", "least", "most"),
    [(1, 3, 3, 3), (100, 2, 50, 60), (6, 22, 44, 70), (6, 136, 50, 60), (30, 390, 230, 250)],
)
def test_short_runs_have_a_curve(epochs: int, updates: int, least: int, most: int) -> None:
    """About fifty rows, the first updates and the last among them; one of fifty in a long run."""
    plan = plan_of(epochs, updates)
    rows = steps(plan, plan.logs)
    assert least <= len(rows) <= most
    assert rows[:2] == [1, 2]
    assert rows[-1] == plan.total_steps
    assert max(after - before for before, after in pairwise(rows)) <= 50
    assert plan.facts().log_every == plan.log_every


@pytest.mark.parametrize("epochs", [500, 10_000])
def test_long_runs_have_few_rows(epochs: int) -> None:
    """About a thousand, however many updates they make."""
    plan = plan_of(epochs, 390)
    assert 900 <= plan.total_steps / plan.log_every <= MOST_ROWS


def test_epochs_end_has_a_checkpoint_where_the_last_one_is_old() -> None:
    """What a flag asks for does not depend on that, nor does the end of the run."""
    plan = plan_of(4, 10, checkpoint_every=7)
    assert steps(plan, plan.saves) == [7, 10, 14, 20, 21, 28, 30, 35, 40]
    assert steps(plan, lambda step: plan.saves(step, False)) == [7, 14, 21, 28, 35, 40]
    by_epoch = plan_of(4, 10)
    assert steps(by_epoch, by_epoch.saves) == [10, 20, 30, 40]
    assert steps(by_epoch, lambda step: by_epoch.saves(step, False)) == [40]


def test_asked_interval_is_kept() -> None:
    """A flag's number is what is logged, and the end of the run."""
    plan = plan_of(10, 10, log_every=30, eval_every=7)
    assert steps(plan, plan.logs) == [30, 60, 90, 100]
    assert steps(plan, plan.evaluates) == [*range(7, 101, 7)]


@pytest.mark.parametrize(("epochs", "updates"), [(1, 5), (20, 117), (21, 3), (100, 2), (999, 1)])
def test_many_short_epochs_have_few_evaluations(epochs: int, updates: int) -> None:
    """Each is at an epoch's end, and each epoch's where there are no more than twenty."""
    plan = plan_of(epochs, updates)
    evaluated = steps(plan, plan.evaluates)
    assert 10 <= len(evaluated) <= MOST_EVALUATIONS or len(evaluated) == epochs
    assert all(step % updates == 0 for step in evaluated)


def test_cut_run_evaluates_as_what_it_is() -> None:
    """Of a hundred epochs cut to five, each is evaluated."""
    plan = plan_of(100, 2, max_steps=10)
    assert steps(plan, plan.evaluates) == [2, 4, 6, 8, 10]
    assert plan.log_every == 1


def test_epochs_by_default_need_other() -> None:
    """A data set that a recipe does not name has those of "other"; else it is a sentence."""
    order = SimpleNamespace(updates_per_epoch=5, global_batch=8)
    assert Plan(Config(), order, "mine", {"digits": 3, "other": 7}).total_steps == 35
    with pytest.raises(UserError, match=r"names digits.*data set is mine.*\"other\".*--epochs"):
        Plan(Config(), order, "mine", {"digits": 3})


def test_epoch_is_that_of_the_next_update() -> None:
    """From 0; after the last update it is the last one, also of a run that is cut short."""
    plan = plan_of(3, 4)
    assert [plan.epoch(step) for step in range(13)] == [0] * 4 + [1] * 4 + [2] * 5
    cut = plan_of(3, 4, max_steps=6)
    assert [cut.epoch(step) for step in range(7)] == [0] * 4 + [1] * 3
