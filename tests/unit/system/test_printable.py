"""Text from outside: no terminal obeys it, and none is too long to be read."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import console
from common.errors import UserError
from common.system.printable import LONGEST_LINE, listed, printable

TEXTS = st.text(st.characters(codec=None)) | st.text(
    "\x1b[31m\x9b\r\b\x07\u202e\x7fab\n\t", max_size=50
)


@given(TEXTS)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    """Tab and newline but for themselves; and all of it can be written as UTF-8."""
    shown = printable(text)
    left = {unicodedata.category(letter) for letter in shown if letter not in "\n\t"}
    assert not left & {"Cc", "Cs"}
    assert "\u202e" not in shown
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"])))
def test_ordinary_text_is_left_as_it_is(text: str) -> None:
    """In any script."""
    assert printable(text) == text


def test_long_lines_keep_their_beginning_and_their_end() -> None:
    """The advice stands at the end; 50 MB take no longer than a moment."""
    began = time.monotonic()
    error = UserError(f"--config {'x' * 50_000_000} does not exist: pass a run's config.json")
    assert time.monotonic() - began < 20
    assert len(error.message) < LONGEST_LINE + 100
    assert error.message.startswith("--config xxx")
    assert error.message.endswith("does not exist: pass a run's config.json")
    assert error.code == f"error: {error.message}"


def test_bytes_of_a_locale_of_ascii_are_letters_again() -> None:
    """As Python reads the command line where the locale knows no others."""
    assert printable("l\udcc3\udca4uft \udcff") == r"läuft \udcff"


def test_all_that_is_printed_or_kept_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name with the codes that clear a screen."""
    kept: list[str] = []
    monkeypatch.setattr(console, "TOLD", [kept.append])
    console.say("run \x1b[2J")
    console.warn("run \x1b[2J")
    console.tell("run \x1b[2J")
    assert capsys.readouterr().out == "run \\x1b[2J\n" * 2
    assert kept == ["run \\x1b[2J"] * 3


@pytest.mark.parametrize(("length", "is_shortened"), [(199, False), (200, False), (201, True)])
def test_item_is_shortened_where_letters_are_left_out(length: int, is_shortened: bool) -> None:
    """And not where the sentence has all of them."""
    phrase = listed(["x" * length, "y"])
    assert phrase == f"{'x' * min(length, 200)}{'…' if is_shortened else ''}, y"


def test_long_list_says_how_many_items_are_left_out() -> None:
    assert listed([*"abcde"]) == "a, b, c, d, e"
    assert listed([*"abcdefg"]) == "a, b, c, d, e, and 2 more"
