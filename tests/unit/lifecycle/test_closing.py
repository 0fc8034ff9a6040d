"""The end of a run that another error replaces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Preempted, TrainingError
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


def error_in_a_lock(stop: BaseException) -> BaseException:
    """Return the error that Python raises if a signal handler raises within a lock."""
    lock = threading.Condition()
    try:
        with lock:
            lock.release()  # as if the handler had run while the lock was being released
            raise stop
    except RuntimeError as error:
        return error
    raise AssertionError("the lock raised no error")


def test_stop_within_a_lock_is_still_a_stop() -> None:
    """Without this, the run would count as failed, and a supervisor would not start it again."""
    stop = Preempted("stopped by SIGTERM", is_by_ctrl_c=False)
    error = error_in_a_lock(stop)
    assert "release un-acquired lock" in str(error)
    assert closing.stop_behind(error) is stop
    assert closing.stop_behind(stop) is stop
    assert closing.stop_behind(error_in_a_lock(ValueError())) is None
    assert closing.stop_behind(None) is None


@pytest.mark.parametrize("is_in_a_lock", [True, False])
def test_run_ends_with_the_request_to_stop(
    is_in_a_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop is noted, and raised unless it is the error that already ends the process."""
    stop = Preempted("stopped by SIGTERM", is_by_ctrl_c=False)
    error = error_in_a_lock(stop) if is_in_a_lock else stop
    noted: list[BaseException] = []
    monkeypatch.setattr(closing, "end_unfinished_run", lambda error, *_: noted.append(error))
    monkeypatch.setattr(releasing, "release", lambda *_: None)
    rehearsal: Any = SimpleNamespace(add_note_to=lambda error, is_explained: None)
    context: Any = None
    with pytest.raises(Preempted) if is_in_a_lock else nullcontext():
        closing.close(context, Stages(), rehearsal, error, is_embedded=False)
    assert noted == [stop]
