"""The end of a run that another error replaces."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import TrainingError
from common.lifecycle.end import closing, releasing
from common.lifecycle.stages import LoadedData, Stages


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

    monkeypatch.setattr(closing, "end_unfinished_run", replace)
    monkeypatch.setattr(releasing, "lift_limit", note("memory limit"))
    monkeypatch.setattr(releasing, "forget_accelerator", note("Accelerator"))
    loader: Any = SimpleNamespace(close=note("loader"))
    never: Any = None  # nothing decides on early stopping here
    stages = Stages(
        loaded=LoadedData(None, {"train": loader}, "test", "test", early_stopping=never)
    )
    rehearsal: Any = SimpleNamespace(add_note_to=lambda error, is_explained: None)
    context: Any = SimpleNamespace(
        decisions=SimpleNamespace(request=SimpleNamespace(release=note("signal handlers"))),
        provenance=SimpleNamespace(wait=note("provenance")),
        directory=SimpleNamespace(release=note("lock")),
        config=SimpleNamespace(unfreeze=note("flags")),
    )
    with pytest.raises(type(raised)):
        closing.close(context, stages, rehearsal, MemoryError(), is_embedded=True)
    expected = ["flags", "loader", "provenance", "lock", "signal handlers", "memory limit"]
    expected += ["Accelerator"]
    assert released == expected
