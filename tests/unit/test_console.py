"""The console of a run: on a terminal, in a log, and on rank 0 only."""

from __future__ import annotations

import io
import os
import pty
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
    """It has the first lines, then some a second, and always the last."""
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


@pytest.mark.parametrize("broken", ["full", "closed"])
def test_output_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The reader of a pipe may be gone, as with `| head`, or the disk be full."""
    reader, writer = os.pipe()
    os.close(reader)
    if broken == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(open(writer, "wb"), encoding="utf-8"))  # noqa: SIM115
        console.protect_output()
        for _ in range(3):
            console.say("x" * 10_000)
            console.CONSOLE.print("a table")
    assert_output_fails(broken)


# What a program may write to standard error after its terminal is gone.
LAST_WORDS = {
    "half a line": "sys.stderr.write('lost')",
    "a line": "print('lost', file=sys.stderr)",
    "a warning": "warnings.warn('lost')",
    "a log line": "logging.getLogger().warning('lost')",
}


@pytest.mark.parametrize("last_words", LAST_WORDS)
@pytest.mark.parametrize("function", ["protect_output", "protect_tool_output"])
def test_terminal_that_is_gone_changes_no_exit_status(function: str, last_words: str) -> None:
    """Python exits with 120 if it can't write the rest of standard error."""
    code = (
        "import logging, sys, warnings\n"
        "logging.basicConfig()\n"  # holds the object of standard error
        f"from common.console import {function}\n"
        f"{function}()\n"
        "sys.stdin.readline()\n"
        f"{LAST_WORDS[last_words]}\n"
        "sys.exit(75)\n"
    )
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=os.environ | {"PYTHONUNBUFFERED": ""},  # otherwise no rest is left to write
    )
    os.close(stderr)
    os.close(terminal)
    process.communicate(b"go on\n")
    assert process.returncode == 75


def test_standard_error_of_a_program_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the stream that Python opened is replaced."""
    with (tmp_path / "errors").open("w") as errors, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", errors)
        console.protect_output()
        assert sys.stderr is errors


def assert_output_fails(broken: str) -> None:
    """Check that a plain file would have raised an error where the console's output did not."""
    reader, writer = os.pipe()
    os.close(reader)
    if broken == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    plain = io.FileIO(writer, "w")
    with plain, pytest.raises(OSError, match=r"Broken pipe|No space left"):
        plain.write(b"x")


def test_letters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may be called ü on a terminal that has ASCII only."""
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
        console.protect_output()
        console.say("ü")
        console.CONSOLE.print("日")
        assert written.getvalue() == b"\\xfc\n\\u65e5\n"


def test_terminal_has_a_bar(screen: io.StringIO) -> None:
    """It names the phases before the loop, follows the step, and prints text literally."""
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
    """Its brackets are printed literally."""
    console.warn("no [b] tracker")
    assert screen.getvalue() == "\x1b[33mno [b] tracker\x1b[0m\n"


def test_warning_in_a_log_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs read logs."""
    console.warn("no [b] tracker")
    assert capsys.readouterr().out == "no [b] tracker\n"


def test_ctrl_c_during_imports_gives_one_sentence() -> None:
    """There is no traceback of the imports."""
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


def test_native_messages_are_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    """Output of C++ libraries is hidden within the block, and not afterwards."""
    with console.without_native_messages():
        os.write(2, b"from C++\n")
    os.write(2, b"from Python\n")
    assert capfd.readouterr().err == "from Python\n"


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
    assert ended.stderr == "error: the current directory is gone: change to one that is there\n"
