"""Ctrl-C and SIGTERM end the work of a tool, which says how to continue it."""

from __future__ import annotations

import signal

import pytest

from common.tools.launching.stopping import STOPPED, stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_work_with_a_command(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is that of Ctrl-C, and the handler of SIGTERM is as before."""
    handler_before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, stoppable("recipes tune --study runs/a"):
        signal.raise_signal(number)
    assert end.value.code == STOPPED
    assert "stopped: continue with recipes tune --study runs/a" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == handler_before


def test_finished_work_leaves_signals_as_before() -> None:
    """A tool may print tables after its work, and SIGTERM ends it then as usual."""
    handler_before = signal.getsignal(signal.SIGTERM)
    with stoppable("the same command"):
        assert signal.getsignal(signal.SIGTERM) != handler_before
    assert signal.getsignal(signal.SIGTERM) == handler_before
