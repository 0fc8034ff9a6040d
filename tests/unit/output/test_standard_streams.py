"""Standard streams of a run that are closed, full or gone, or lack some symbols."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from common.console import messages
from common.output.standard_streams import ignore_lost_output, without_native_messages


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
        ignore_lost_output()
        for _ in range(3):
            messages.say("x" * 10_000)
            messages.CONSOLE.print("a table")
    assert_output_fails(broken)


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


# What a program may write to standard error after its terminal is gone.
LAST_WORDS = {
    "half a line": "sys.stderr.write('lost')",
    "a line": "print('lost', file=sys.stderr)",
    "a warning": "warnings.warn('lost')",
    "a log line": "logging.getLogger().warning('lost')",
}


@pytest.mark.parametrize("last_words", LAST_WORDS)
@pytest.mark.parametrize("function", ["ignore_lost_output", "end_on_lost_output"])
def test_terminal_that_is_gone_changes_no_exit_status(function: str, last_words: str) -> None:
    """Python exits with 120 if it can't write the rest of standard error."""
    code = (
        "import logging, sys, warnings\n"
        "logging.basicConfig()\n"  # holds the object of standard error
        f"from common.output.standard_streams import {function}\n"
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
    in_memory = io.TextIOWrapper(io.BytesIO())
    with (tmp_path / "errors").open("w") as file, monkeypatch.context() as patch:
        for errors in (file, in_memory):
            patch.setattr("sys.stderr", errors)
            ignore_lost_output()
            assert sys.stderr is errors


def test_letters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may be called ü on a terminal that has ASCII only."""
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
        ignore_lost_output()
        messages.say("ü")
        messages.CONSOLE.print("日")
        assert written.getvalue() == b"\\xfc\n\\u65e5\n"


@pytest.mark.parametrize("has_descriptor", [True, False])
def test_native_messages_are_hidden(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_descriptor: bool
) -> None:
    """Within the block, output of C++ libraries is hidden, and that of Python is not."""
    notebook = io.StringIO()
    stream = open(2, "w", closefd=False) if has_descriptor else notebook  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", stream)
    with without_native_messages():
        os.write(2, b"from C++\n")
        print("from the recipe", file=sys.stderr)
    assert sys.stderr is stream
    print("afterwards", file=sys.stderr, flush=True)
    os.write(2, b"from C++ afterwards\n")
    expected = "from the recipe\nafterwards\n"
    if has_descriptor:
        assert capfd.readouterr().err == f"{expected}from C++ afterwards\n"
    else:
        assert notebook.getvalue() == expected
        assert capfd.readouterr().err == "from C++ afterwards\n"
