"""Turns errors of Python and of libraries into sentences for the user.

A sentence has the problem, its cause in brackets, and what to do, as in
``runs/a can't be made or written ([Errno 28] No space left on device): free some space``.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from common.errors import MisfitError, UserError
from common.failures.disk_errors import advice_for, is_disk_error, number_of
from common.system.wording import shortened

MAX_CHARACTERS = 300  # characters of a library's message that a sentence repeats


def cause_text(
    error: BaseException, most_characters: int = MAX_CHARACTERS, *, first_line: bool = False
) -> str:
    """Return an error in one line, for a sentence: its class, and its text.

    The class is left out if it adds nothing: that of an `OSError` with an error number, and that of
    a `MisfitError`.

    Args:
        most_characters: the characters of the error's text that are repeated.
        first_line: whether only the first line of the error's text is for the user. The other lines
            are a query of a database or a C++ stack, for example.
    """
    text = str(error).strip()
    if first_line:
        text = text.partition("\n")[0]
    text = shortened(" ".join(text.split()), most_characters)
    class_name = type(error).__name__
    if not text:
        return class_name
    if type(error) is OSError or (isinstance(error, OSError) and error.errno is not None):
        return text
    if isinstance(error, MisfitError):
        return text
    return f"{class_name}: {text}"


@contextmanager
def as_user_error(
    errors: type[Exception] | tuple[type[Exception], ...],
    problem: str,
    advice: str | Callable[[Exception], str],
    *,
    most_characters: int = MAX_CHARACTERS,
    first_line: bool = False,
    resumable: Callable[[Exception], bool] = lambda error: False,
) -> Iterator[None]:
    """Turn errors of the given classes into a `UserError`, which has no traceback.

    Args:
        errors: the classes of errors to turn. A `UserError` passes in any case, because it is a
            `SystemExit` and not an `Exception`.
        problem: what is wrong; the error's own text follows in brackets.
        advice: what the user can do; a function of the error if that depends on it.
        most_characters: the argument of `cause_text`.
        first_line: the argument of `cause_text`.
        resumable: whether the same command may succeed later after this error.
    """
    try:
        yield
    except errors as error:
        cause = cause_text(error, most_characters, first_line=first_line)
        raise UserError(
            f"{problem} ({cause})",
            advice=advice if isinstance(advice, str) else advice(error),
            resumable=resumable(error),
        ) from None


@contextmanager
def writing(subject: str, advice: str = "") -> Iterator[None]:
    """Turn an error while a file or folder is written into a `UserError`.

    Args:
        subject: what is written, the first words of the message, such as a path or a flag.
        advice: what the user can do; empty for the advice that fits the error itself.
    """
    with as_user_error(
        # Folders that are nested a thousand deep lead to a RecursionError.
        (OSError, SafetensorError, RecursionError),
        f"{subject} can't be made or written",
        lambda error: advice or advice_for(str(error), number_of(error)),
        resumable=is_disk_error,
    ):
        yield


@contextmanager
def reading(subject: str, advice: str, *, resumable: bool = False) -> Iterator[None]:
    """Turn any error while a library reads a user's file into a `UserError`.

    If the disk is full, an `OSError` is raised instead: libraries write caches of the files that
    they read, and the file itself may be fine.

    Args:
        subject: what is read, the first words of the message, such as a path or a flag.
        advice: what the user can do.
        resumable: whether the same command may succeed later, for example because a download from
            the Hub failed.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust code is not an Exception
        cause = error.__cause__ or error  # libraries wrap the error that explains the failure
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise cause from None
        problem = f"{subject} can't be read ({cause_text(cause)})"
        raise UserError(problem, advice=advice, resumable=resumable) from None
