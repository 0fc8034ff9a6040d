"""Messages on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from common.console import warn


def test_warning_on_a_terminal_is_yellow(screen: io.StringIO) -> None:
    """A warning is yellow, and its brackets are printed literally."""
    warn("no [b] tracker")
    assert screen.getvalue() == "\x1b[33mno [b] tracker\x1b[0m\n"


def test_warning_in_a_log_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs read logs."""
    warn("no [b] tracker")
    assert capsys.readouterr().out == "no [b] tracker\n"
