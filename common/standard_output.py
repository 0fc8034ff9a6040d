"""Standard output of tools that print their result, with an error in one sentence if it fails."""

import io
import os
import signal
import sys
from collections.abc import Callable

from common.errors import UserError

ADVICE = "free some space, or send the output elsewhere"


class ToolOutput(io.TextIOWrapper):
    """Standard output that raises a `UserError` when it can't be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as problem:
            raise refused(problem) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as problem:
            raise refused(problem) from None


def refused(problem: OSError) -> UserError:
    """Return the error, and send the rest of the buffer to the null device.

    Python writes the buffer again at exit, which would otherwise fail once more.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return UserError(f"standard output can't be written ({problem.strerror}): {ADVICE}")


def run_tool(main: Callable[[], None]) -> None:
    """Run the `main` of a tool that prints its result.

    The tool ends quietly if the reader of its output closes the pipe, as `head` does.

    Raises:
        UserError: standard output is closed, or can't be written.
    """
    if sys.stdout is None:
        raise UserError("standard output is closed, and the result would be lost: leave it open")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if type(sys.stdout) is io.TextIOWrapper:
        line_buffering = sys.stdout.line_buffering
        sys.stdout = ToolOutput(
            sys.stdout.detach(), "utf-8", "backslashreplace", line_buffering=line_buffering
        )
    main()
    sys.stdout.flush()
