"""When a run logs, evaluates and saves, with and without flags."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UserError
from common.training.plan import MAX_EVALUATIONS, MAX_ROWS, Plan
from recipes.mnist_mlp import Config


def plan_of(epochs: int, updates_per_epoch: int, **flags: Any) -> Plan:
    """Return the plan of a run with so many epochs and updates per epoch."""
    order = SimpleNamespace(updates_per_epoch=updates_per_epoch, global_batch=8)
    return Plan(Config(epochs=epochs, **flags), order, "digits", {})


def steps(plan: Plan, due: Any) -> list[int]:
    """Return the updates at which `due` holds."""
    return [step for step in range(1, plan.total_steps + 1) if due(step)]


@pytest.mark.parametrize(
    ("epochs", "updates", "least", "most"),
    [(1, 3, 3, 3), (100, 2, 50, 60), (6, 22, 44, 70), (6, 136, 50, 60), (30, 390, 230, 250)],
)
def test_short_runs_log_about_fifty_rows(epochs: int, updates: int, least: int, most: int) -> None:
    """The first two updates and the last one are logged. In a long run, one update of fifty is."""
    plan = plan_of(epochs, updates)
    rows = steps(plan, plan.logs)
    assert least <= len(rows) <= most
    assert rows[:2] == [1, 2]
    assert rows[-1] == plan.total_steps
    assert max(after - before for before, after in pairwise(rows)) <= 50
    assert plan.facts().log_every == plan.log_every


@pytest.mark.parametrize("epochs", [500, 10_000])
def test_long_runs_log_at_most_a_thousand_rows(epochs: int) -> None:
    """The number of updates does not matter."""
    plan = plan_of(epochs, 390)
    assert 900 <= plan.total_steps / plan.log_every <= MAX_ROWS


def test_end_of_an_epoch_is_saved_if_the_last_checkpoint_is_old() -> None:
    """A flag's interval and the end of the run are always saved."""
    plan = plan_of(4, 10, checkpoint_every=7)
    assert steps(plan, plan.saves) == [7, 10, 14, 20, 21, 28, 30, 35, 40]
    assert steps(plan, lambda step: plan.saves(step, False)) == [7, 14, 21, 28, 35, 40]
    by_epoch = plan_of(4, 10)
    assert steps(by_epoch, by_epoch.saves) == [10, 20, 30, 40]
    assert steps(by_epoch, lambda step: by_epoch.saves(step, False)) == [40]


def test_interval_of_a_flag_is_kept() -> None:
    """The end of the run is logged as well."""
    plan = plan_of(10, 10, log_every=30, eval_every=7)
    assert steps(plan, plan.logs) == [30, 60, 90, 100]
    assert steps(plan, plan.evaluates) == [*range(7, 101, 7)]


@pytest.mark.parametrize(("epochs", "updates"), [(1, 5), (20, 117), (21, 3), (100, 2), (999, 1)])
def test_many_short_epochs_have_few_evaluations(epochs: int, updates: int) -> None:
    """Evaluations come at the end of epochs: of each one up to twenty, of some beyond."""
    plan = plan_of(epochs, updates)
    evaluated = steps(plan, plan.evaluates)
    assert 10 <= len(evaluated) <= MAX_EVALUATIONS or len(evaluated) == epochs
    assert all(step % updates == 0 for step in evaluated)


def test_truncated_run_evaluates_like_a_short_one() -> None:
    """A hundred epochs cut to five evaluate after each of them."""
    plan = plan_of(100, 2, max_steps=10)
    assert steps(plan, plan.evaluates) == [2, 4, 6, 8, 10]
    assert plan.log_every == 1


def test_default_epochs_need_an_entry_for_other_data() -> None:
    """A data set that the recipe does not name takes the epochs of "other"."""
    order = SimpleNamespace(updates_per_epoch=5, global_batch=8)
    assert Plan(Config(), order, "mine", {"digits": 3, "other": 7}).total_steps == 35
    message = r"no entry for data set mine, only for digits.*\"other\".*--epochs"
    with pytest.raises(UserError, match=message):
        Plan(Config(), order, "mine", {"digits": 3})


def test_epoch_is_that_of_the_next_update() -> None:
    """Epochs count from 0. After the last update, it is that of the last update."""
    plan = plan_of(3, 4)
    assert [plan.epoch(step) for step in range(13)] == [0] * 4 + [1] * 4 + [2] * 5
    cut = plan_of(3, 4, max_steps=6)
    assert [cut.epoch(step) for step in range(7)] == [0] * 4 + [1] * 3
