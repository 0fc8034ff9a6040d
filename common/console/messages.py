"""Messages: lines that rank 0 prints above the progress bar and passes to listeners."""

from collections.abc import Callable

from rich.console import Console

from common.system.launch_variables import is_main_rank, rank
from common.system.printable import printable

CONSOLE = Console(highlight=False, soft_wrap=True)
# Functions that get each line of rank 0, besides the terminal.
LINE_LISTENERS: list[Callable[[str], None]] = []


def say(message: str, style: str | None = None) -> None:
    """On rank 0, print a line, above the bar if there is one, and pass it to `LINE_LISTENERS`."""
    if is_main_rank():
        message = printable(message)
        log_line(message)
        if CONSOLE.is_terminal:
            CONSOLE.print(message, markup=False, style=style)
        else:
            print(message, flush=True)  # as rich would print it, in a tenth of the time


def warn(message: str, *, every_rank: bool = False) -> None:
    """Print a warning: on rank 0, or with `every_rank` on each rank that calls this.

    `every_rank` is for a problem that one rank alone may have. Other ranks than 0 only print the
    line: they have no bar and no listeners.
    """
    if every_rank and not is_main_rank():
        print(f"rank {rank()}: {printable(message)}", flush=True)
    else:
        say(message, style="yellow")


def log_line(line: str) -> None:
    """Pass a line to all of `LINE_LISTENERS`, such as the run's log, without printing it."""
    line = printable(line)
    for listener in LINE_LISTENERS:
        listener(line)
