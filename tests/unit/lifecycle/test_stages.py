"""A recipe that makes its calls in another order is told which one is missing."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from common.lifecycle.stages import reached
from common.run import Run

# What a recipe may ask for, and the call that comes before it.
CALLS_BEFORE = {
    "data": "run.loaders(data)",
    "all_loaders": "run.loaders(data)",
    "plan": "run.make_plan(train_loader, DEFAULT_EPOCHS)",
    "should_evaluate": "run.make_plan(train_loader, DEFAULT_EPOCHS)",
    "should_stop": "run.loaders(data)",
    "kept_parts": "run.keep(model=model",
    "started_run": "run.start(description, compute_loss)",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run at its first stage, without an Accelerator and a directory."""
    from unittest.mock import MagicMock

    monkeypatch.setattr("common.run.set_up", MagicMock())
    monkeypatch.setattr("common.run.compute_dtype", MagicMock())
    monkeypatch.setattr("common.run.record_reads", MagicMock())
    config: Any = MagicMock()
    return Run(config, __file__, "accuracy:max", rehearse=False)


@pytest.mark.parametrize("name", [*CALLS_BEFORE])
def test_missing_call_is_named(name: str, run: Run) -> None:
    """In a sentence, where an attribute would be missing."""
    with pytest.raises(UserError) as refused:
        getattr(run, name)
    assert CALLS_BEFORE[name] in refused.value.message


@pytest.mark.parametrize("call", ["record", "save", "finish"])
def test_loop_needs_its_beginning(call: str, run: Run) -> None:
    """The last of the calls that are missing."""
    arguments = () if call == "save" else (0.5,)
    with pytest.raises(UserError, match=r"the recipe has not called .*run\.(start|batches)\("):
        getattr(run, call)(*arguments)


def test_stage_that_is_there_is_returned() -> None:
    """As it is."""
    stage = object()
    assert reached(stage, "run.start()") is stage
