"""What a run shows while it goes on: on a terminal, in a log, and on one rank alone."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from common import console


def test_log_has_a_line_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal, what is shown is a plain line."""
    display = console.ProgressDisplay(total_steps=40, first_step=10)
    assert display.bar is None
    display.update(20, 0.5, "loss 0.1234  [rmse] 3.2")
    display.close()
    assert capsys.readouterr().out == "epoch 0.50  step 20/40  loss 0.1234  [rmse] 3.2\n"


def test_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins where a resumed run does, and takes text as it is, brackets too."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, highlight=False)
    monkeypatch.setattr(console, "CONSOLE", terminal)
    display = console.ProgressDisplay(total_steps=40, first_step=10)
    assert display.bar is not None
    assert display.bar.tasks[0].completed == 10
    display.update(20, 0.5, "[rmse] 3.2")
    console.say("above the bar [b]")
    display.bar.refresh()
    display.close()
    shown = screen.getvalue()
    assert all(text in shown for text in ("epoch 0.50  step 20/40", "[rmse] 3.2", "bar [b]"))


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 speaks for the job."""
    monkeypatch.setenv("RANK", "1")
    console.say("nothing")
    console.ProgressDisplay(4, 0).update(1, 0.1, "nothing")
    assert capsys.readouterr().out == ""


def test_native_messages_are_kept_from_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """What C++ writes meanwhile, and nothing afterwards."""
    with console.without_native_messages():
        os.write(2, b"from C++\n")
    os.write(2, b"from Python\n")
    assert capfd.readouterr().err == "from Python\n"
