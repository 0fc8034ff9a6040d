"""Signals that ask a process to stop."""

from __future__ import annotations

import signal

from common.machine import STOP_SIGNALS
from common.training.stop import StopRequest


def test_signal_that_nobody_heeds_ends_the_process() -> None:
    """Evaluating alone has nothing to save: SIGTERM and Ctrl-C do what they always do."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        StopRequest(heeded=False)
        assert all(signal.getsignal(number) == signal.SIG_DFL for number in STOP_SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
