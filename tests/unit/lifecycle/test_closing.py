"""The end of a run that another error replaces."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common import run as module
from common.errors import TrainingError
from common.lifecycle import releasing
from common.lifecycle.stages import LoadedData, Stages
from common.run import Run


@pytest.mark.parametrize("raised", [SystemExit(1), TrainingError("memory ran out", advice="-")])
def test_a_run_is_released_if_its_error_is_replaced(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, the next run needs the directory's lock and the signal handlers."""
    released: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: released.append(name)

    def replace(*_: object) -> None:
        raise raised

    monkeypatch.setattr(module, "close_after", replace)
    monkeypatch.setattr(releasing, "lift_limit", note("memory limit"))
    monkeypatch.setattr(releasing, "forget_accelerator", note("Accelerator"))
    run: Any = Run.__new__(Run)
    loader: Any = SimpleNamespace(close=note("loader"))
    never: Any = None  # nothing decides on early stopping here
    run.stages = Stages(
        loaded=LoadedData(None, {"train": loader}, "test", "test", early_stopping=never)
    )
    run.evaluations = SimpleNamespace(rehearsal=SimpleNamespace(explain=lambda error: None))
    run.context = SimpleNamespace(
        decisions=SimpleNamespace(request=SimpleNamespace(release=note("signal handlers"))),
        provenance=SimpleNamespace(wait=note("provenance")),
        directory=SimpleNamespace(release=note("lock")),
    )
    run.is_called_by_a_program = True
    with pytest.raises(type(raised)):
        run.close(MemoryError())
    expected = ["loader", "provenance", "lock", "signal handlers", "memory limit", "Accelerator"]
    assert released == expected
