"""Signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from common.system.platforms import STOP_SIGNALS
from common.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give the test's process its own handlers back."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_that_nobody_heeds_ends_the_process() -> None:
    """Evaluating alone has nothing to save: SIGTERM and Ctrl-C do what they always do."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    StopRequest(heeded=False)
    assert all(signal.getsignal(number) == signal.SIG_DFL for number in STOP_SIGNALS)


def test_terminal_that_closes_is_a_request_unless_it_is_ignored() -> None:
    """As after `nohup`, which is there to ignore it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request = StopRequest()
    os.kill(os.getpid(), signal.SIGHUP)
    assert request.reason == "SIGHUP"
    for heeded in (True, False):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        request = StopRequest(heeded)
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.reason is None
