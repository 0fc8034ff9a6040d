"""Says how a launch ended, by its exit status and by what it printed."""

import signal
from pathlib import Path

ERROR = "error: "  # the beginning of the line that a recipe prints about an error
FRAME = " │╭╮╰╯─"  # characters that some libraries draw around a message


def ending_in_words(status: int, log: Path, most_lines: int = 1) -> str:
    """Return in one line how a launch ended, with the last error that it printed.

    Args:
        status: the exit status; below 0, the signal that ended the process.
        log: the file with all that the process printed.
        most_lines: how many of the last lines are repeated if no line is an error.
    """
    end = f"ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    text = log.read_text(encoding="utf-8", errors="replace")
    return f"{end}: {last_error(text, most_lines)} ({log} has all of it)"


def last_error(text: str, most_lines: int = 1) -> str:
    """Return the last error in an output; without one, its last lines that are not empty."""
    stripped = [line.strip(FRAME) for line in text.splitlines()]
    lines = [line for line in stripped if line]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    last_lines = errors[-1:] or lines[-most_lines:]
    return " / ".join(last_lines) or "it printed nothing"
