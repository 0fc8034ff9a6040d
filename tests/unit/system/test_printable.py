"""Text from outside: it cannot control a terminal, and never fills it."""

from __future__ import annotations

import time
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.system.printable import MAX_LINE_LENGTH, printable

TEXTS = st.text(st.characters(codec=None)) | st.text(
    "\x1b[31m\x9b\r\b\x07\u202e\x7fab\n\t", max_size=50
)


@given(TEXTS)
def test_control_characters_are_escaped(text: str) -> None:
    """Only tab and newline stay, and all of the text is valid UTF-8."""
    shown = printable(text)
    categories = {unicodedata.category(letter) for letter in shown if letter not in "\n\t"}
    assert not categories & {"Cc", "Cs"}
    assert "\u202e" not in shown
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"])))
def test_ordinary_text_is_unchanged(text: str) -> None:
    """This holds for any script."""
    assert printable(text) == text


def test_long_lines_keep_their_beginning_and_their_end() -> None:
    """The advice stands at the end. Even 50 MB take a moment only."""
    began = time.monotonic()
    error = UserError(f"--config {'x' * 50_000_000} does not exist: pass the config.json of a run")
    assert time.monotonic() - began < 20
    assert len(error.message) < MAX_LINE_LENGTH + 100
    assert error.message.startswith("--config xxx")
    assert error.message.endswith("does not exist: pass the config.json of a run")
    assert error.code == f"error: {error.message}"


def test_surrogates_of_an_ascii_locale_become_letters() -> None:
    """Python reads the command line that way in such a locale."""
    assert printable("l\udcc3\udca4uft \udcff") == r"läuft \udcff"
