"""Figures of a run whose evaluation uses every way to measure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import final_weights, rows_without_clock
from tests.launch import REPOSITORY, Finished, Runner
from tests.metrics_recipe import SIZES

RECIPE = REPOSITORY / "tests" / "metrics_recipe.py"
FLAGS = ("--tracker", "none", "--log-every", 1, "--mixed-precision", "no", "--num-workers", 0)
DRAWN = ("torch", "numpy", "python")


def whole(runner: Runner, **arguments: Any) -> Finished:
    """Return the run of all epochs."""
    return runner.shared(RECIPE, *FLAGS, **arguments)


def assert_figures(run: Finished, processes: int) -> None:
    """Check the run's totals over all samples, rates, epochs and random draws."""
    updates = SIZES["train"] // (8 * processes)
    rows = [row for row in run.metrics if "train/loss" in row]
    assert [row["train/epoch"] for row in rows] == [e for e in range(3) for _ in range(updates)]
    assert {row["train/first"] for row in rows} == {100.0}
    assert {row.get("train/second") for row in rows} == {1.0 if processes > 1 else None}
    assert {row["train/learning_rate"] for row in rows} == {0.01}
    assert {row["train/learning_rate/head"] for row in rows} == {0.02}
    evaluated = [row for row in run.metrics if "val/loss" in row]
    assert len(evaluated) == 3
    each = -(-SIZES["validation"] // processes)
    for row in evaluated:
        total = SIZES["validation"] * (SIZES["validation"] + 1) / 2
        assert row["val/count"] == SIZES["validation"]
        assert row["val/real"] == row["val/gathered"] == total
        assert row["val/bank"] == SIZES["bank"] * (SIZES["bank"] + 1) / 2
        assert row["val/equal_batches"] == processes * -(-each // 8)
    for name in DRAWN:
        assert len({row[f"val/{name}"] for row in evaluated}) == 1, name


def test_figures_of_one_process(runner: Runner) -> None:
    """The figures are right, and a model with boolean indexing has an MFU without a warning."""
    run = whole(runner)
    assert_figures(run, 1)
    assert run.summary["perf/mfu"] > 0
    assert "perf/mfu" not in run.output + run.errors


@pytest.mark.slow
def test_figures_of_two_processes(runner: Runner) -> None:
    """The figures are right though ranks differ in their metrics and numbers of batches."""
    assert_figures(whole(runner, launcher="two forks"), 2)


@pytest.mark.parametrize("launcher", ["fork", pytest.param("two forks", marks=pytest.mark.slow)])
def test_rehearsal_leaves_no_trace(launcher: Any, runner: Runner) -> None:
    """A run has the same rows and weights with and without the rehearsal of its evaluation."""
    with_it = whole(runner, **({} if launcher == "fork" else {"launcher": launcher}))
    without = runner.run(RECIPE, *FLAGS, "--no-rehearse", launcher=launcher)
    assert rows_without_clock(with_it.directory) == rows_without_clock(without.directory)
    assert final_weights(with_it.directory) == final_weights(without.directory)


def test_evaluation_again_gives_the_same_figures(runner: Runner) -> None:
    """`--evaluate-only` on the same weights repeats all figures, also those with random draws."""
    run = whole(runner)
    again = runner.run(RECIPE, *FLAGS, "--evaluate-only", "--init-from", run.directory)
    for name in (*DRAWN, "loss", "accuracy", "count", "bank"):
        assert again.summary[f"test/{name}"] == run.summary[f"test/{name}"], name


@pytest.mark.parametrize(
    ("mistake", "launcher", "sentence"),
    [
        ("name", "fork", "the objective is accuracy:max, but the evaluation returned only loss"),
        (
            "loss as total",
            "fork",
            "sums.add takes totals over a batch but got the mean of 'loss'",
        ),
        (
            "metric as total",
            "fork",
            "sums.add takes totals over a batch but got the mean of 'accuracy'",
        ),
        ("error", "fork", "The error came in the rehearsal of the evaluation"),
        pytest.param(
            "loss as total",
            "two forks",
            "sums.add takes totals over a batch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistake_in_the_evaluation_ends_the_run_before_it_begins(
    mistake: str, launcher: Any, sentence: str, runner: Runner
) -> None:
    """The rehearsal reports a misuse in one sentence and the recipe's own error by its traceback.

    The run has made no update by then.
    """
    run = runner.run(RECIPE, *FLAGS, "--mistake", mistake, launcher=launcher, succeeds=False)
    assert run.returncode != 0
    assert sentence in run.output + run.errors, run.explain()
    assert ("Traceback" in run.errors) == (mistake == "error")
    assert run.metrics == []
    assert run.status["global_step"] == 0
    assert not run.status["resumable"]
