"""What the terminal shows, on rank 0 only."""

import atexit
import gc
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from rich import progress
from rich.console import Console
from rich.live import Live

from common.errors import advice_for
from common.system.machine import is_main_rank, rank
from common.system.printable import PLAIN, printable

CONSOLE = Console(highlight=False, soft_wrap=True)
LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "wandb")  # that take seconds
LAUNCHER_TRACEBACKS = (
    "the launcher may now print KeyboardInterrupt or SignalException, which is not an error"
)
# Functions that get each line of rank 0, besides the terminal.
LINE_LISTENERS: list[Callable[[str], None]] = []


class Output(io.TextIOWrapper):
    """A standard stream of a run, which goes on if its terminal is closed or its disk is full."""

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

        It ends silently if the reader of its output is gone, and otherwise says why.
        """
        try:
            yield
        except OSError as error:
            # When Python exits, it writes the rest of the output, which would fail once more. So
            # the rest goes to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):  # of `| head`, which has read what it wanted
                raise SystemExit(1) from None
            message = f"standard output can't be written ({error.strerror})"
            advice = advice_for(str(error))
            raise SystemExit(f"error: {message}: {advice}, or name another file") from None


def protect_output() -> None:
    """Prepare standard output and standard error so that a run outlives its terminal.

    Text that can't be written is dropped, and symbols that the terminal can't show are replaced.
    """
    open_closed_streams()
    replace_output(Output, by_line=False)


def protect_tool_output() -> None:
    """Prepare standard output so that a tool ends without a traceback if it can't be written.

    A run goes on without its output; see `protect_output`. A tool has no other result, so it ends.
    """
    is_closed = sys.stdout is None
    open_closed_streams()
    if is_closed:
        advice = "open it, or discard what is printed with > /dev/null"
        raise SystemExit(f"error: standard output is closed: {advice}")
    # By line: what can't be written is an error at once, and not after the tool's end.
    replace_output(ToolOutput, by_line=True)


def replace_output(output_class: type[io.TextIOWrapper], *, by_line: bool) -> None:
    """Put objects of other classes in place of the standard streams, unless a program has done so.

    Both streams then write lookalikes for symbols that they don't have.

    Args:
        output_class: of standard output. Standard error gets `Output`, also in a tool.
        by_line: whether to write each line of standard output at once, also into a pipe or a file.
    """
    stdout = sys.stdout
    if type(stdout) is io.TextIOWrapper:
        encoding = stdout.encoding
        line_buffering = stdout.line_buffering or by_line
        sys.stdout = output_class(stdout.detach(), encoding, PLAIN, line_buffering=line_buffering)
    replace_standard_error()


def replace_standard_error() -> None:
    """Put an `Output` in place of standard error, unless a program has replaced it.

    When Python exits, it writes the rest of both streams. If that fails, as after the terminal is
    closed, the exit status would be 120 in place of the program's own.
    """
    stderr = sys.stderr
    if not isinstance(stderr, io.TextIOWrapper):
        return
    stderr.reconfigure(errors=PLAIN)
    if type(stderr) is io.TextIOWrapper and stderr.fileno() == 2:
        # The old object stays usable, because the handlers of loggers may hold it.
        descriptor = open(2, "wb", closefd=False)  # noqa: SIM115
        sys.stderr = Output(descriptor, stderr.encoding, PLAIN, line_buffering=True)


def open_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next file that is opened would take the stream's number, and prints would go into
    that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def say(message: str, style: str | None = None) -> None:
    """Print a line on rank 0: above the bar where there is one."""
    if is_main_rank():
        message = printable(message)
        log_line(message)
        if CONSOLE.is_terminal:
            CONSOLE.print(message, markup=False, style=style)
        else:
            print(message, flush=True)  # the same characters, in a tenth of the time


def warn(message: str, *, every_rank: bool = False) -> None:
    """Print a warning: on rank 0, or with `every_rank` on each rank that calls this."""
    if every_rank and not is_main_rank():
        print(f"rank {rank()}: {printable(message)}", flush=True)
    else:
        say(message, style="yellow")


def log_line(line: str) -> None:
    """Pass a line to all of `LINE_LISTENERS`, such as the run's log, without printing it."""
    line = printable(line)
    for listener in LINE_LISTENERS:
        listener(line)


# Log lines that a run prints at once, and then each second. A run may have more updates a second
# than anybody reads.
LINES_AT_ONCE = 100
LINES_PER_SECOND = 5


class LineLimit:
    """Lets through some lines at once, and then so many each second."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.lines = 0

    def allows(self) -> bool:
        """Whether another line may be printed now; if so, it is counted."""
        seconds = time.monotonic() - self.began
        if self.lines >= LINES_AT_ONCE + LINES_PER_SECOND * seconds:
            return False
        self.lines += 1
        return True


def make_bar() -> progress.Progress:
    """Return a bar with no task yet. A task needs the field `text`."""
    text = partial(progress.TextColumn, markup=False)
    return progress.Progress(
        *(progress.SpinnerColumn(), text("{task.description}"), progress.BarColumn(None)),
        *(text("{task.fields[text]}"), progress.TimeRemainingColumn()),
    )


class Display:
    """Shows a run's progress: as a bar on a terminal, else as a printed line per log interval."""

    def __init__(self) -> None:
        self.live: Live | None = None
        self.bar = make_bar()
        self.doing = ""  # the present activity, if it is not training
        self.text = ""  # the figures of the last interval
        self.position: Callable[[], tuple[int, float]] | None = None  # update and epoch
        self.total_steps = 0  # of the whole run, once it is known
        self.limit = LineLimit()

    def begin(self, doing: str = "") -> None:
        """Show the bar on a terminal, if it is not shown yet, until `close` or the process's end.

        Args:
            doing: the present activity; empty shows which library is being loaded.
        """
        self.doing = doing
        if self.live is None and is_main_rank() and CONSOLE.is_terminal:
            self.bar = make_bar()
            self.bar.add_task("", total=None, text="")
            # A thread of its own draws: no update waits for the terminal.
            self.live = Live(
                get_renderable=self.draw, console=CONSOLE, refresh_per_second=8, transient=True
            )
            self.live.start()
            atexit.register(self.close)

    def draw(self) -> progress.Progress:
        """Return the bar with the run's present position; a thread calls this."""
        task = self.bar.tasks[0]
        position = self.position
        if position is None:  # training has not started
            completed = 0
            description = f"{self.place()} …"
            text = f"{task.elapsed or 0:.0f} s"
        else:
            completed = position()[0]
            description = self.place()
            text = self.doing or self.text
        self.bar.update(task.id, description=description, text=text, completed=completed)
        return self.bar

    def start(self, total_steps: int, position: Callable[[], tuple[int, float]]) -> None:
        """Show the position in the training from now on.

        Args:
            total_steps: the updates of the whole run.
            position: returns the update and the epoch; it is called whenever the bar is drawn.
        """
        self.total_steps = total_steps
        self.position = position
        self.doing = ""
        self.limit = LineLimit()
        if self.live is not None:
            self.bar.update(self.bar.task_ids[0], total=total_steps, completed=position()[0])

    def interval(self, text: str) -> None:
        """Show the metrics of a log interval: in the bar on a terminal, else as a line.

        The line of the last update is always printed. Other lines may be left out, as `LineLimit`
        decides.
        """
        self.text = text
        is_last = self.position is not None and self.position()[0] == self.total_steps
        if not (self.limit.allows() or is_last):
            return
        print_line = say if self.live is None else log_line  # the bar shows it already
        print_line(f"{self.place()}  {text}")

    def place(self) -> str:
        """Return the epoch and the update, or before training the present activity."""
        if self.position is None:
            # The library that was imported last, or is being imported.
            loaded = [name for name in list(sys.modules) if name in LIBRARIES]
            return self.doing or f"loading {(loaded or ['Python'])[-1]}"
        step, epoch = self.position()
        return f"epoch {epoch:.2f}  step {step}/{self.total_steps}"

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
        self.live = self.position = None


DISPLAY = Display()


def begin() -> None:
    """Prepare a recipe's process for its imports, which take seconds.

    - A terminal shows which library is being loaded.
    - Ctrl-C ends the program with one sentence, until the run handles signals itself.
    - A current directory that no longer exists ends the program with one sentence.
    - At exit, Python skips a garbage collection that would take a second and free nothing.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        message = f"stopped by Ctrl-C before the first update; {LAUNCHER_TRACEBACKS}"
        raise SystemExit(message if is_main_rank() else 1)

    signal.signal(signal.SIGINT, stop)
    try:
        os.getcwd()
    except OSError:  # torch's libraries would end the process in their own words
        message = "error: the current directory is gone: change to one that is there"
        raise SystemExit(message if is_main_rank() else 1) from None
    atexit.register(gc.freeze)
    DISPLAY.begin()


@contextmanager
def without_native_messages() -> Iterator[None]:
    """Keep C++ code, such as torch's profiler, from writing messages to the terminal.

    It writes to the descriptor of standard error, so that is turned to the null device.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def quiet_transformers() -> None:
    """Silence Transformers' reports that a user can do nothing about, such as a new head's."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    # The name that all releases of version 5 know; it goes in version 6.
    warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")
    logging.disable_progress_bar()
