"""Evaluations of several networks, and objectives that are NaN."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from common.lifecycle.first_batch import warn_of_nan
from examples import regression
from tests.small_run import FLAGS, run

pytestmark = pytest.mark.usefixtures("quick_runs")

EVALUATE = regression.evaluate
EVALUATED = (*FLAGS, "--eval-every", 1)


def evaluate_two(monkeypatch: pytest.MonkeyPatch, *, last: str, split: str | None = None) -> None:
    """Have the recipe evaluate a copy of its model as well, before or after the model.

    Args:
        last: "model" or "copy".
        split: the only split on which the copy comes last; None: on each split.
    """
    copies: list[torch.nn.Module] = []

    def evaluate(recipe_run: Any, model: Any, loader: Any) -> dict[str, float]:
        copies[:] = copies or [copy.deepcopy(model)]
        is_other_split = split is not None and loader is not recipe_run.all_loaders[split]
        is_model_last = last == "model" or is_other_split
        networks = [copies[0], model] if is_model_last else [model, copies[0]]
        figures = [EVALUATE(recipe_run, network, loader) for network in networks]
        return figures[-1]

    monkeypatch.setattr(regression, "evaluate", evaluate)


def test_network_that_is_evaluated_last_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal says so, before any training."""
    evaluate_two(monkeypatch, last="model")
    error, output = run(*EVALUATED, "--output-dir", tmp_path)
    assert error is None
    sentence = "2 networks are evaluated before run.log(...), and the last one is saved as the best"
    assert output.count(sentence) == 1
    assert output.index(sentence) < output.index("step 2/4")


def test_best_weights_are_not_loaded_into_another_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would export weights that belong to no figure."""
    evaluate_two(monkeypatch, last="copy")
    error, _ = run(*EVALUATED, "--output-dir", tmp_path)
    assert isinstance(error, UserError)
    assert "run.load_best(...) got another network than the one that was saved" in error.message
    assert not (tmp_path / "model").exists()


def test_exported_network_is_the_best_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final evaluation ends with another network than the one with the best weights."""
    evaluate_two(monkeypatch, last="copy", split="test")
    error, _ = run(*EVALUATED, "--output-dir", tmp_path)
    assert isinstance(error, UserError)
    assert "which the run exports, is not the one that run.load_best(...) got" in error.message
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("when", ["always", "at the end"])
def test_fresh_copies_may_be_evaluated(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe may average weights into a copy each time, or merge adapters at the end."""

    def evaluate(recipe_run: Any, model: Any, loader: Any) -> dict[str, float]:
        is_at_the_end = loader is recipe_run.all_loaders["test"]
        if when == "always" or is_at_the_end:
            model = copy.deepcopy(model)
        return EVALUATE(recipe_run, model, loader)

    monkeypatch.setattr(regression, "evaluate", evaluate)
    error, _ = run(*EVALUATED, "--output-dir", tmp_path)
    assert error is None
    assert (tmp_path / "model").exists()


def test_last_network_is_exported_without_a_best_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--keep last`, the recipe may evaluate and export any network."""
    evaluate_two(monkeypatch, last="copy")
    error, _ = run(*EVALUATED, "--keep", "last", "--output-dir", tmp_path)
    assert error is None
    assert (tmp_path / "model").exists()


def test_objective_that_is_nan_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early stopping names it as its reason, instead of a value that did not improve."""

    def evaluate(recipe_run: Any, model: Any, loader: Any) -> dict[str, float]:
        return EVALUATE(recipe_run, model, loader) | {"rmse": float("nan")}

    monkeypatch.setattr(regression, "evaluate", evaluate)
    error, output = run(*EVALUATED, "--early-stopping", 2, "--output-dir", tmp_path)
    assert error is None
    assert output.count("rmse, the objective, is NaN, so this evaluation can't be the best") == 1
    assert "stopped early after update 2, because rmse was NaN in 2 evaluations" in output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "val/rmse" in rows[-1]


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"inputs": [1.0, float("nan")], "labels": [1.0, 2.0]}, "batch['inputs']"),
        (([1.0], {"a": [float("nan")], "b": [[float("nan")]]}), "batch[1]['a'], batch[1]['b']"),
        ({"inputs": [1.0, float("inf")]}, None),
        ({"ids": [1, 2], "name": ["text"]}, None),
    ],
)
def test_nan_in_the_first_batch_is_named(
    batch: Any, names: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Infinity may be meant, as in a mask of attention."""

    def as_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_tensors(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(as_tensors, value))
        return value if isinstance(value[0], str) else torch.tensor(value)

    warn_of_nan(as_tensors(batch))
    output = capsys.readouterr().out
    expected = f"the first training batch has NaN in {names}, for example" if names else ""
    assert output.startswith(expected)
    assert bool(output) == bool(names)


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("way", ["loop", "equal_batches"])
def test_evaluation_of_the_training_loader_is_refused(
    way: str, rehearse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how to get figures of training samples."""

    def evaluate(recipe_run: Any, model: Any, loader: Any) -> dict[str, float]:
        train_loader = recipe_run.all_loaders["train"]
        if way == "loop":
            return EVALUATE(recipe_run, model, train_loader)
        with recipe_run.evaluating(model):
            next(recipe_run.equal_batches(train_loader))
        return {}

    monkeypatch.setattr(regression, "evaluate", evaluate)
    if not rehearse:
        monkeypatch.setattr(regression, "Run", partial(regression.Run, rehearse=False))
    error, _ = run(*EVALUATED, "--output-dir", tmp_path)
    assert isinstance(error, UserError)
    assert error.problem == "the evaluation reads train_loader, which is only for training"
    assert "add a split with some of them to Data" in error.advice
