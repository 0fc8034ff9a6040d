"""Looks in a message for a user for the class of an exception that our own code raised.

Where our code finds a mistake, it knows the sentence for the user. The class of an exception is
only for errors of Python and of libraries, whose own text may say too little.
"""

from __future__ import annotations

import ast
import functools
import traceback
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from tests.launch import REPOSITORY


def require_no_own_class(error: UserError, folder: Path = REPOSITORY / "common") -> None:
    """Raise an `AssertionError` if a message has the class of an exception of our code.

    Args:
        folder: the folder of our code.
    """
    for cause in causes_of(error):
        name = type(cause).__name__
        is_named = f"{name}: " in error.message or f"({name})" in error.message
        if is_named:
            assert not is_raised_in(cause, folder), error.message


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors from which an error was made, also after ``raise ... from None``."""
    # Several errors may have the same cause, and causes may even form a circle.
    seen = {id(error)}
    causes = [error.__cause__, error.__context__]
    while causes:
        cause = causes.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            causes += [cause.__cause__, cause.__context__]


def is_raised_in(error: BaseException, folder: Path) -> bool:
    """Whether a ``raise`` in a file of a folder raised an error, and no library or operation."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    file, line = frames[-1].filename, frames[-1].lineno
    return Path(file).is_relative_to(folder) and line in lines_of_raises(file)


@functools.cache
def lines_of_raises(file: str) -> set[int]:
    """Return the numbers of the lines of all ``raise`` statements in a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            assert node.end_lineno is not None
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines
