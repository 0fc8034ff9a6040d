"""Describes how a launched process ended, by its exit status and its printed output."""

import signal
from pathlib import Path

ERROR = "error: "  # the beginning of the line in which a recipe prints an error
FRAME = " │╭╮╰╯─"  # characters that some libraries draw around a message


def ending_in_words(status: int, log: Path, most_lines: int = 1) -> str:
    """Return one line on how a launched process ended, with the last error that it printed.

    Args:
        status: the exit status; a negative number stands for the signal that ended the process.
        log: the file with the complete output of the process.
        most_lines: the number of last lines to repeat if no line is an error.
    """
    ending = f"ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    last_words = last_error(log.read_text(encoding="utf-8", errors="replace"), most_lines)
    if not last_words:
        return f"{ending}, and it printed nothing"
    return f"{ending}: {last_words} ({log} has all of it)"


def last_error(text: str, most_lines: int) -> str:
    """Return the last error in an output; without one, its last lines that are not empty.

    Lines are joined by slashes. The result is empty if the output is.

    Args:
        text: the output of a process.
        most_lines: the number of last lines to return if no line is an error.
    """
    stripped = [line.strip(FRAME) for line in text.splitlines()]
    lines = [line for line in stripped if line]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    last_lines = errors[-1:] or lines[-most_lines:]
    return " / ".join(last_lines)
