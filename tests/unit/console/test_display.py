"""The progress of a run: on a terminal, in a log, and on rank 0 only."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from common.console import say
from common.console.display import LINES_AT_ONCE, LINES_PER_SECOND, Display


def test_log_has_one_line_per_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, output consists of plain lines."""
    display = Display()
    display.begin("starting")
    assert display.live is None
    display.start(40, lambda: (20, 0.5))
    display.show_interval("loss 0.1234  [rmse] 3.2")
    display.close()
    assert capsys.readouterr().out == "epoch 0.50  step 20/40  loss 0.1234  [rmse] 3.2\n"


def test_log_has_few_lines_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the first lines, then a few a second, and always the last line."""
    clock = 0.0
    step = 0
    clock_module = SimpleNamespace(monotonic=lambda: clock)
    monkeypatch.setattr("common.console.display.time", clock_module)
    display = Display()
    display.begin("starting")
    display.start(2000, lambda: (step, 0.5))
    for step in range(1, 2001):  # noqa: B007
        clock += 0.01
        display.show_interval("loss 0.1")
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert all(f"step {number}/" in lines[number - 1] for number in range(1, 101))
    assert "step 2000/2000" in lines[-1]
    assert len(lines) == pytest.approx(LINES_AT_ONCE + 20 * LINES_PER_SECOND, abs=2)


def test_terminal_has_a_bar(screen: io.StringIO) -> None:
    """The bar names the phases before the loop, follows the step, and prints text literally."""
    display = Display()
    steps = iter(range(10, 40))
    display.begin()
    assert display.live is not None
    assert display.progress_text().startswith("loading ")
    display.show_activity("reading the data")
    display.live.refresh()
    display.start(40, lambda: (next(steps), 0.25))
    assert display.bar.tasks[0].completed == 10
    display.show_interval("[rmse] 3.2")
    say("above the bar [b]")
    display.live.refresh()
    assert display.bar.tasks[0].completed > 10  # the bar asks for the step by itself
    display.show_activity("evaluating")
    display.live.refresh()
    display.close()
    texts = ("reading the data …", "epoch 0.25  step", "[rmse] 3.2", "bar [b]", "evaluating")
    assert all(text in screen.getvalue() for text in texts)
    assert display.live is None


def test_terminal_has_one_bar(screen: io.StringIO) -> None:
    """The bar of loading becomes that of training, and the cursor is restored at the end."""
    display = Display()
    display.begin()
    live = display.live
    display.begin("starting")
    assert display.live is live
    display.close()
    display.close()
    hidden = "\x1b[?25l"
    shown = "\x1b[?25h"
    assert screen.getvalue().count(hidden) == screen.getvalue().count(shown) == 1


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 speaks for the job."""
    monkeypatch.setenv("RANK", "1")
    say("nothing")
    display = Display()
    display.start(4, lambda: (1, 0.1))
    display.show_interval("nothing")
    assert capsys.readouterr().out == ""
