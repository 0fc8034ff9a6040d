"""The frames of an error's traceback that run the user's code."""

from pathlib import Path
from types import FrameType, TracebackType

from common.system.installed_code import is_in_standard_library, is_installed

LIBRARIES = ("common", "torch", "accelerate")


def shorten_traceback(error: BaseException) -> None:
    """Leave only the frames of the user's code in the traceback of an error."""
    shortened: TracebackType | None = None
    for entry in tracebacks_of(error):  # the innermost first
        if is_of_user(entry.tb_frame):
            shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shortened


def place_in_words(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, in brackets."""
    line = user_line_of(error)
    return "" if line is None else f" (in {line})"


def user_line_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's code in a traceback, such as "train.py, line 12".

    The result is None if the traceback has no such line.
    """
    for entry in tracebacks_of(error):
        if is_of_user(entry.tb_frame):
            file = Path(entry.tb_frame.f_code.co_filename).name
            return f"{file}, line {entry.tb_lineno}"
    return None


def tracebacks_of(error: BaseException) -> list[TracebackType]:
    """Return the entries of an error's traceback, the innermost first."""
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries[::-1]


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame runs the recipe, or a module of the user's."""
    file = frame.f_code.co_filename
    is_of_library = package_of(frame) in LIBRARIES or is_installed(file)
    return not is_of_library and not is_in_standard_library(file)


def package_of(frame: FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
