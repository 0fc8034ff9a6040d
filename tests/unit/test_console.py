"""The console of a run: on a terminal, in a log, and on rank 0 only."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from common import console


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output of a terminal of 120 columns."""
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120, highlight=False)
    monkeypatch.setattr(console, "CONSOLE", terminal)
    return shown


def test_log_has_one_line_per_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, output consists of plain lines."""
    display = console.Display()
    display.begin("starting")
    assert display.live is None
    display.start(40, lambda: (20, 0.5))
    display.interval("loss 0.1234  [rmse] 3.2")
    display.close()
    assert capsys.readouterr().out == "epoch 0.50  step 20/40  loss 0.1234  [rmse] 3.2\n"


def test_log_has_few_lines_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the first lines, then a few a second, and always the last line."""
    clock = 0.0
    step = 0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock))
    display = console.Display()
    display.begin("starting")
    display.start(2000, lambda: (step, 0.5))
    for step in range(1, 2001):  # noqa: B007
        clock += 0.01
        display.interval("loss 0.1")
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert all(f"step {number}/" in lines[number - 1] for number in range(1, 101))
    assert "step 2000/2000" in lines[-1]
    assert len(lines) == pytest.approx(console.LINES_AT_ONCE + 20 * console.LINES_PER_SECOND, abs=2)


def test_terminal_has_a_bar(screen: io.StringIO) -> None:
    """The bar names the phases before the loop, follows the step, and prints text literally."""
    display = console.Display()
    steps = iter(range(10, 40))
    display.begin()
    assert display.live is not None
    assert display.place().startswith("loading ")
    display.doing = "reading the data"
    display.live.refresh()
    display.start(40, lambda: (next(steps), 0.25))
    assert display.bar.tasks[0].completed == 10
    display.interval("[rmse] 3.2")
    console.say("above the bar [b]")
    display.live.refresh()
    assert display.bar.tasks[0].completed > 10  # the bar asks for the step by itself
    display.doing = "evaluating"
    display.live.refresh()
    display.close()
    texts = ("reading the data …", "epoch 0.25  step", "[rmse] 3.2", "bar [b]", "evaluating")
    assert all(text in screen.getvalue() for text in texts)
    assert display.live is None


def test_terminal_has_one_bar(screen: io.StringIO) -> None:
    """The bar of loading becomes that of training, and the cursor is restored at the end."""
    display = console.Display()
    display.begin()
    live = display.live
    display.begin("starting")
    assert display.live is live
    display.close()
    display.close()
    hidden = "\x1b[?25l"
    shown = "\x1b[?25h"
    assert screen.getvalue().count(hidden) == screen.getvalue().count(shown) == 1


def test_warning_on_a_terminal_is_yellow(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning is yellow, and its brackets are printed literally."""
    console.warn("no [b] tracker")
    assert screen.getvalue() == "\x1b[33mno [b] tracker\x1b[0m\n"


def test_warning_in_a_log_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs read logs."""
    console.warn("no [b] tracker")
    assert capsys.readouterr().out == "no [b] tracker\n"


def test_ctrl_c_during_imports_gives_one_sentence() -> None:
    """Ctrl-C during imports gives one sentence without a traceback."""
    code = "import os; from common.console import begin; begin(); os.kill(os.getpid(), 2)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("stopped by Ctrl-C before the first update")
    assert "Traceback" not in ended.stderr


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 speaks for the job."""
    monkeypatch.setenv("RANK", "1")
    console.say("nothing")
    display = console.Display()
    display.start(4, lambda: (1, 0.1))
    display.interval("nothing")
    assert capsys.readouterr().out == ""


def test_exit_skips_garbage_collection() -> None:
    """Objects are frozen at exit, so that Python's last collection is short."""
    first = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))"
    code = f"{first}; from common.console import begin; begin()"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) > 10_000


def test_missing_current_directory_gives_one_sentence(tmp_path: Path) -> None:
    """It comes before torch is loaded, whose libraries would abort the process."""
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone');"
        "from common.console import begin; begin()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 1
    expected = "error: the current directory was removed: change to a folder that exists\n"
    assert ended.stderr == expected
