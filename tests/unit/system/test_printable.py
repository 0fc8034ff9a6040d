"""Text from outside: it cannot control a terminal, and never fills it."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.console import messages
from common.errors import UserError
from common.system.printable import MAX_LINE_LENGTH, printable
from common.system.text_secrets import has_secret, without_secrets, without_tokens
from common.system.wording import listed

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


@pytest.mark.parametrize("beginning", ["hf_", "wandb_v1_", "ghp_", "ghs_", "github_pat_"])
def test_refused_token_is_also_left_out_of_texts(beginning: str) -> None:
    """What the command line refuses is not kept in a file either."""
    token = beginning + "aB3" * 12
    assert has_secret(f"--notes={token}")
    assert without_tokens(f"login('{token}')") == "login('***')"
    short = f"{beginning}small"
    assert not has_secret(short)
    assert without_tokens(short) == short


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


@pytest.mark.parametrize(("length", "is_shortened"), [(199, False), (200, False), (201, True)])
def test_long_item_ends_in_an_ellipsis(length: int, is_shortened: bool) -> None:
    """An item that fits does not."""
    phrase = listed(["x" * length, "y"])
    assert phrase == f"{'x' * min(length, 200)}{'…' if is_shortened else ''}, y"


def test_long_list_says_how_many_items_are_left_out() -> None:
    """Up to five items are listed."""
    assert listed([*"abcde"]) == "a, b, c, d, e"
    assert listed([*"abcdefg"]) == "a, b, c, d, e, and 2 more"


@pytest.mark.parametrize("secrets", [("hunter2", "hunter2-long"), ("hunter2-long", "hunter2")])
def test_secret_that_begins_like_another_hides_neither_in_part(secrets: tuple[str, str]) -> None:
    assert without_secrets("a = 'hunter2-long', b = 'hunter2'", secrets) == "a = '***', b = '***'"
