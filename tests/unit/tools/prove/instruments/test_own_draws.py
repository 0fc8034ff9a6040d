"""The instrument that observes random numbers from a generator of the loop's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.tools.prove.instruments.own_draws import DrawObserver
from common.tools.prove.observation.session import Session

Body = Callable[[Session], object]


def draws_of(body: Body, tmp_path: Path, *, compiled: bool = False) -> list[str]:
    """Return the operations that the instrument writes for a loop of two updates."""
    progress = SimpleNamespace(global_step=0)
    run: Any = SimpleNamespace(config=SimpleNamespace(compile=compiled), progress=progress)
    session = Session(folder=tmp_path, launch=0, rank=0, run=run)
    observer = DrawObserver(session)
    loader: Any = None
    for _ in observer.around_batches(lambda run, loader: iter([{}, {}]), run, loader):
        body(session)
        observer.around_record(lambda run: None, run)
        torch.rand(1, generator=torch.Generator())  # after the batch was used
        progress.global_step += 1
    if session.file is None:
        return []
    session.file.close()
    lines = (tmp_path / "launch-0-rank-0.jsonl").read_text().splitlines()
    return [json.loads(line)["operation"] for line in lines]


def draw(session: Session) -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(2, generator=generator)
    torch.randn(2, generator=generator)
    torch.ones(2).bernoulli_(0.5, generator=generator)


def draw_in_evaluation(session: Session) -> None:
    with session.in_evaluation("validation"):
        draw(session)


def attend(session: Session) -> None:
    """Attention without dropout draws nothing, although torch marks it as random."""
    rows = torch.ones(1, 1, 4, 8, requires_grad=True)
    F.scaled_dot_product_attention(rows, rows, rows).sum().backward()


def choose_by_value(session: Session) -> None:
    """This operation calls a function, so it has no tags."""
    value = torch.ones(2)
    torch.cond(value.sum() > 0, torch.sin, torch.cos, (value,))


def test_draws_are_written_once_for_each_update(tmp_path: Path) -> None:
    assert draws_of(draw, tmp_path) == ["randn", "bernoulli_"] * 2


@pytest.mark.parametrize(
    "body", [draw_in_evaluation, attend, choose_by_value, lambda session: torch.rand(2)]
)
def test_other_operations_are_not_written(body: Body, tmp_path: Path) -> None:
    """The states of torch's own generators are compared, so their draws are known."""
    assert draws_of(body, tmp_path) == []


def test_a_compiled_recipe_is_not_observed(tmp_path: Path) -> None:
    assert draws_of(draw, tmp_path, compiled=True) == []
