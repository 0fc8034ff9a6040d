"""Errors of Python and of libraries become one sentence each."""

from __future__ import annotations

import errno
import os

import pytest

from common.errors import MisfitError, UserError
from common.failures.sentences import as_user_error, cause_text, reading, writing


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such\n  column"), "ValueError: no such column"),
        (ValueError(" \n"), "ValueError"),
        (OSError(errno.ENOENT, "No such file", "a/b"), "[Errno 2] No such file: 'a/b'"),
        (OSError("it is a pipe"), "it is a pipe"),
        (ConnectionError("no route"), "ConnectionError: no route"),
        (MisfitError("it has other buffers"), "it has other buffers"),
        (RuntimeError("1234567890 and more"), "RuntimeError: 1234567890…"),
    ],
)
def test_cause_is_one_line(error: Exception, text: str) -> None:
    """The cause has the error's class, unless the text says enough without it."""
    most_characters = 10 if isinstance(error, RuntimeError) else 300
    assert cause_text(error, most_characters) == text


def test_other_lines_are_left_out_on_request() -> None:
    """Further lines, such as the query of a database, are left out on request."""
    error = ValueError("no such table\n[SQL: SELECT 1]")
    assert cause_text(error, first_line=True) == "ValueError: no such table"


def test_given_errors_become_sentences() -> None:
    """Others keep their class and their traceback, and a sentence stays as it is."""
    caught = as_user_error(ValueError, "it fails", "mend it", resumable=lambda error: True)
    with pytest.raises(UserError) as refused, caught:
        raise ValueError("a cause")
    assert refused.value.message == "it fails (ValueError: a cause): mend it"
    assert refused.value.resumable
    with pytest.raises(TypeError, match="its own"), as_user_error(ValueError, "it fails", "mend"):
        raise TypeError("its own")
    with (
        pytest.raises(UserError, match=r"^error: a sentence$"),
        as_user_error(Exception, "it", "do"),
    ):
        raise UserError("a sentence")


def test_advice_may_depend_on_the_error() -> None:
    with (
        pytest.raises(UserError, match=r": mend a cause$"),
        as_user_error(ValueError, "it fails", lambda error: f"mend {error}"),
    ):
        raise ValueError("a cause")


def test_reading_passes_what_is_no_damage() -> None:
    """A full disk and Ctrl-C are not taken for damage of the file that is read."""
    sentence = r"^error: a\.csv can't be read \(KeyError: 'x'\): mend it$"
    with pytest.raises(UserError, match=sentence), reading("a.csv", "mend it"):
        raise KeyError("x")
    with pytest.raises(OSError, match="No space"), reading("a.csv", "mend it"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(KeyboardInterrupt), reading("a.csv", "mend it"):
        raise KeyboardInterrupt


def test_advice_follows_the_reason() -> None:
    """The caller states what to do. Other exceptions pass through."""
    with pytest.raises(UserError) as refused, writing("runs/a", "free some space"):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/b")
    assert refused.value.message == (
        "runs/a can't be made or written ([Errno 28] No space left on device: 'runs/a/b'): "
        "free some space"
    )
    with pytest.raises(ValueError, match="its own"), writing("runs/a"):
        raise ValueError("its own")


def test_default_advice_fits_the_error() -> None:
    """The caller states none here."""
    with pytest.raises(UserError, match=r"'runs/a/b'\): free some space$"), writing("runs/a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/b")
