"""Messages on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from common.console import messages, warn


def test_warning_on_a_terminal_is_yellow(screen: io.StringIO) -> None:
    """A warning is yellow, and its brackets are printed literally."""
    warn("no [b] tracker")
    assert screen.getvalue() == "\x1b[33mno [b] tracker\x1b[0m\n"


def test_warning_in_a_log_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs read logs."""
    warn("no [b] tracker")
    assert capsys.readouterr().out == "no [b] tracker\n"


def test_printed_and_recorded_text_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example clears a terminal."""
    kept: list[str] = []
    monkeypatch.setattr(messages, "LINE_LISTENERS", [kept.append])
    messages.say("run \x1b[2J")
    messages.warn("run \x1b[2J")
    messages.log_line("run \x1b[2J")
    assert capsys.readouterr().out == "run \\x1b[2J\n" * 2
    assert kept == ["run \\x1b[2J"] * 3
