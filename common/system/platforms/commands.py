"""Commands and paths, as this system's shell reads them."""

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from common.system.platforms import current


def command_line(words: Iterable[str]) -> str:
    """Join words into a command that can be pasted into this system's shell."""
    return subprocess.list2cmdline([*words]) if current.IS_WINDOWS else shlex.join(words)


def with_posix_command(advice: str, command: str) -> str:
    """Add an example command to advice, unless the system is Windows, which lacks the command."""
    return advice if current.IS_WINDOWS else f"{advice}, for example with {command}"


def quoted(word: object) -> str:
    """Quote one word, such as a path, for a command that can be pasted."""
    return command_line([str(word)])


def shown_path(path: Path) -> str:
    """Return a path as a message shows it: relative if it is inside the current folder."""
    absolute = os.path.abspath(path)
    try:
        relative = os.path.relpath(absolute)
    except ValueError:  # on another Windows drive
        return absolute
    return absolute if relative.split(os.sep)[0] == os.pardir else relative


def split_words(text: str) -> list[str]:
    """Split words as a shell does; a backslash is part of a path on Windows.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    words = shlex.shlex(text, posix=True, punctuation_chars=False)
    words.whitespace_split = True
    words.commenters = ""  # "#" is a character like any other
    if current.IS_WINDOWS:
        words.escape = ""
    return [*words]
