"""Signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from common.system.platforms.process_tree import PARENT_ENDED
from common.system.platforms.signals import STOP_SIGNALS
from common.training import stop_request
from common.training.stop_request import StopRequest


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the signal handlers of the test's process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_unheeded_signals_end_the_process() -> None:
    """Evaluation alone has nothing to save, so that SIGTERM and Ctrl-C act as usual."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    StopRequest(acts_on_signals=False)
    assert all(signal.getsignal(number) == signal.SIG_DFL for number in STOP_SIGNALS)


def test_sighup_is_a_request_to_stop_unless_ignored() -> None:
    """`nohup` ignores it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request = StopRequest(acts_on_signals=True)
    os.kill(os.getpid(), signal.SIGHUP)
    assert request.reason == "SIGHUP"
    for acts_on_signals in (True, False):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        request = StopRequest(acts_on_signals)
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.reason is None


def test_handler_of_the_launchers_end_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a finished run would swallow the signal that ends a program that goes on."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setattr(stop_request, "signal_when_parent_ends", lambda: None)
    monkeypatch.setattr(stop_request, "is_orphan", lambda: False)
    before = signal.getsignal(PARENT_ENDED)
    request = StopRequest(acts_on_signals=True)
    assert signal.getsignal(PARENT_ENDED) == request.receive
    request.release()
    assert signal.getsignal(PARENT_ENDED) == before


def test_signal_handlers_are_restored_and_threads_set_none() -> None:
    """A notebook has handlers of its own, and a thread may not set any."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    request = StopRequest(acts_on_signals=True)
    assert signal.getsignal(signal.SIGTERM) == request.receive
    request.release()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    requests: list[StopRequest] = []
    thread = threading.Thread(target=lambda: requests.append(StopRequest(acts_on_signals=True)))
    thread.start()
    thread.join()
    assert requests[0].reason is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
