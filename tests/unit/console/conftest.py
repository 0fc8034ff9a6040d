"""A terminal in memory, for the tests of this folder."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from common.console import display, messages


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output of a terminal of 120 columns."""
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120, highlight=False)
    monkeypatch.setattr(messages, "CONSOLE", terminal)
    monkeypatch.setattr(display, "CONSOLE", terminal)
    return shown
