"""Standard output and standard error that may be closed, full or gone, or lack some symbols."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from common.failures.disk_errors import advice_for
from common.system.printable import PLAIN


def ignore_lost_output() -> None:
    """Prepare standard output and standard error so that a run outlives its terminal.

    Tools that launch runs for hours use this, too. Text that can't be written is dropped, and
    symbols that the terminal can't show are replaced.
    """
    open_closed_streams()
    replace_output(Output, by_line=False)


def end_on_lost_output() -> None:
    """Prepare standard output so that a tool ends without a traceback if it can't write there.

    This is for a tool whose only result is its output. A run goes on without its output: see
    `ignore_lost_output`.
    """
    is_closed = sys.stdout is None
    open_closed_streams()
    if is_closed:
        advice = "open it, or discard what is printed with > /dev/null"
        raise SystemExit(f"error: standard output is closed: {advice}")
    # Write line by line, so that an error comes at once, and not after the tool's end.
    replace_output(ToolOutput, by_line=True)


class Output(io.TextIOWrapper):
    """A standard stream that drops what can't be written, for a run that outlives its terminal."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class ToolOutput(io.TextIOWrapper):
    """Standard output of a tool, which ends without a traceback if its output can't be written."""

    def write(self, text: str) -> int:
        with self.ending():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self.ending():
            super().flush()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the tool if its output can't be written.

        The tool ends silently if the reader of its output is gone, and otherwise says why.
        """
        try:
            yield
        except OSError as error:
            # When Python exits, it writes the rest of the output, which would fail once more. So
            # the rest goes to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):  # `| head`, for example, has read enough
                raise SystemExit(1) from None
            message = f"standard output can't be written ({error.strerror})"
            advice = advice_for(str(error), error.errno)
            raise SystemExit(f"error: {message}: {advice}, or write to another file") from None


def replace_output(output_class: type[io.TextIOWrapper], *, by_line: bool) -> None:
    """Replace standard output and standard error, unless a program has replaced them already.

    The new streams write lookalikes for symbols that their encodings lack.

    Args:
        output_class: the class of standard output. Standard error gets `Output`, also in a tool.
        by_line: whether to write each line of standard output at once, also into a pipe or a file.
    """
    stdout = sys.stdout
    if type(stdout) is io.TextIOWrapper:
        encoding = stdout.encoding
        line_buffering = stdout.line_buffering or by_line
        sys.stdout = output_class(stdout.detach(), encoding, PLAIN, line_buffering=line_buffering)
    replace_standard_error()


def replace_standard_error() -> None:
    """Replace standard error by an `Output`, unless a program has replaced it.

    When Python exits, it writes the rest of both streams. If that fails, for example because the
    terminal is closed, the exit status would be 120 instead of the program's own.
    """
    stderr = sys.stderr
    if not isinstance(stderr, io.TextIOWrapper):
        return
    stderr.reconfigure(errors=PLAIN)
    if stderr is sys.__stderr__:
        # The old object stays usable, because the handlers of loggers may hold it.
        descriptor = open(2, "wb", closefd=False)  # noqa: SIM115
        sys.stderr = Output(descriptor, stderr.encoding, PLAIN, line_buffering=True)


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next file that is opened would take the stream's number, and prints would go into
    that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


@contextmanager
def without_native_messages() -> Iterator[None]:
    """Keep C++ code, such as torch's profiler, from writing messages to the terminal.

    Such code writes to the descriptor of standard error, which leads to the null device in the
    block. `sys.stderr` still leads to the terminal, so that nothing of the recipe is lost. Only a
    logger may hold the stream from before the block, and lose its lines.
    """
    stderr = sys.stderr
    stderr.flush()
    terminal = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    if writes_to_descriptor(stderr, 2):
        stream = open(terminal, "wb", closefd=False)  # noqa: SIM115
        sys.stderr = Output(stream, stderr.encoding, PLAIN, line_buffering=True)
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = stderr
        os.dup2(terminal, 2)
        os.close(terminal)


def writes_to_descriptor(stream: TextIO, descriptor: int) -> bool:
    """Whether a stream writes to this descriptor; that of a notebook has none."""
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError, AttributeError):
        return False
