"""The instrument that observes gradients between the micro-batches of an update."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.tools.prove.instruments.changed_gradients import GradientObserver
from common.tools.prove.layouts.pairs import cause_of_changed_gradients
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import GradientChange
from tests.unit.tools.prove.made_up_records import run_with

Edit = Callable[[nn.Module], object]


def changes_of(edit: Edit, tmp_path: Path, *, is_update: bool = False) -> list[dict[str, Any]]:
    """Return what the instrument writes if an edit follows the first of two backward passes."""
    model = nn.Linear(2, 1)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(
            parts=SimpleNamespace(shared={"model": model}), recipe_file=__file__
        ),
        progress=SimpleNamespace(global_step=0),
    )
    session = Session(folder=tmp_path, launch=0, rank=0, run=run)
    observer = GradientObserver(session)
    observer.around_start(lambda run: None, run)
    for _ in range(2):
        loss = model(torch.ones(1, 2)).sum()
        observer.around_backward(torch.Tensor.backward, loss)
        edit(model)
        run.progress.global_step += is_update
        session.end_micro_batch(is_update=is_update)
    if session.file is None:
        return []
    session.file.close()
    lines = (tmp_path / "launch-0-rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2


def test_gradients_that_only_add_up_are_right(tmp_path: Path) -> None:
    assert changes_of(lambda model: None, tmp_path) == []


def test_gradients_may_change_at_the_end_of_an_update(tmp_path: Path) -> None:
    assert changes_of(halve, tmp_path, is_update=True) == []


@pytest.mark.parametrize(("edit", "after"), [(halve, 3**0.5 / 2), (nn.Module.zero_grad, 0.0)])
def test_a_change_between_micro_batches_is_written(
    edit: Edit, after: float, tmp_path: Path
) -> None:
    (change,) = changes_of(edit, tmp_path)
    assert (change["step"], change["micro_batch"]) == (0, 0)
    assert change["norm_before"] == pytest.approx(3**0.5)
    assert change["norm_after"] == pytest.approx(after)


@pytest.mark.parametrize(
    ("after", "file", "words"),
    [
        (0.5, __file__, "test_changed_gradients.py, line 1, clips the gradients from the norm 2"),
        (0.5, "", "the gradients are changed from the norm 2 to 0.5 between micro-batches 1 and 2"),
        (0.0, "", "the gradients are cleared between micro-batches 1 and 2 of update 4"),
    ],
)
def test_change_in_words(after: float, file: str, words: str) -> None:
    change = GradientChange(
        step=3,
        micro_batch=0,
        norm_before=2.0,
        norm_after=after,
        clipping_file=file,
        clipping_line=1,
    )
    cause = cause_of_changed_gradients(run_with([change]))
    assert cause is not None
    assert words in cause.sentence
    assert "accelerator" in cause.advice


def test_no_change_is_no_cause() -> None:
    assert cause_of_changed_gradients(run_with([])) is None
