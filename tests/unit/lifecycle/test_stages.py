"""Stages of a run: a recipe that calls them out of order is told which call is missing."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from common.lifecycle.stages import reached
from common.run import Run

# Attributes of a run, and the call that must come before each.
CALLS_BEFORE = {
    "loaded": "run.loaders(data)",
    "data": "run.loaders(data)",
    "all_loaders": "run.loaders(data)",
    "plan": "run.make_plan(train_loader, DEFAULT_EPOCHS)",
    "should_evaluate": "run.make_plan(train_loader, DEFAULT_EPOCHS)",
    "should_stop": "run.loaders(data)",
    "kept": "run.keep(model=model",
    "_started": "run.start(description, compute_loss)",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run at its first stage, without an Accelerator and a directory."""
    from unittest.mock import MagicMock

    monkeypatch.setattr("common.run.set_up", MagicMock())
    monkeypatch.setattr("common.run.compute_dtype", MagicMock())
    monkeypatch.setattr("common.run.record_reads", MagicMock())
    config: Any = MagicMock()
    return Run(config, __file__, "accuracy:max", rehearse=False)


@pytest.mark.parametrize("name", [*CALLS_BEFORE])
def test_missing_call_is_named(name: str, run: Run) -> None:
    """One sentence names the missing call, instead of an AttributeError."""
    with pytest.raises(UserError) as refused:
        getattr(run, name)
    assert CALLS_BEFORE[name] in refused.value.message


@pytest.mark.parametrize("call", ["record", "save", "finish"])
def test_calls_of_the_loop_need_its_start(call: str, run: Run) -> None:
    """The message names the call that should come next."""
    arguments = () if call == "save" else (0.5,)
    with pytest.raises(UserError, match=r"the recipe uses what .*run\.(start|batches)\("):
        getattr(run, call)(*arguments)


def test_reached_stage_is_returned() -> None:
    """A stage that exists is passed on unchanged."""
    stage = object()
    assert reached(stage, "run.start()") is stage
