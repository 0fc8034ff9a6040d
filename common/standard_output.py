"""Standard output of tools whose product is what they print: a sentence where it can't be."""

import io
import os
import signal
import sys
from collections.abc import Callable

from common.errors import UserError

ADVICE = "free some space, or send the output elsewhere"


class ToolOutput(io.TextIOWrapper):
    """Standard output that ends the tool with a sentence where it can't be written."""

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
    """Return the sentence; what is still in the buffer goes nowhere, or the exit would fail too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return UserError(f"standard output can't be written ({problem.strerror}): {ADVICE}")


def run_tool(main: Callable[[], None]) -> None:
    """Run the `main` of a tool that prints its result; it ends quietly where a pipe is closed."""
    if sys.stdout is None:
        raise UserError("standard output is closed, and the result would be lost: leave it open")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `| head`
    if type(sys.stdout) is io.TextIOWrapper:
        by_line = sys.stdout.line_buffering
        sys.stdout = ToolOutput(
            sys.stdout.detach(), "utf-8", "backslashreplace", line_buffering=by_line
        )
    main()
    sys.stdout.flush()
