"""What the terminal shows, on rank 0 only."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from common.machine import is_main_rank

CONSOLE = Console(highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print a line on rank 0: above the bar where there is one."""
    if is_main_rank():
        if CONSOLE.is_terminal:
            CONSOLE.print(message, markup=False)
        else:
            print(message, flush=True)  # the same characters, in a tenth of the time


class ProgressDisplay:
    """A bar where there is a terminal; a plain line at each log interval where there is none."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self.total_steps = total_steps
        self.bar: Progress | None = None
        if is_main_rank() and CONSOLE.is_terminal:
            columns = (
                TextColumn("epoch {task.fields[epoch]}  step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=CONSOLE, refresh_per_second=4, transient=True)
            self.bar.add_task("", total=total_steps, completed=first_step, epoch="-", text="")
            self.bar.start()

    def update(self, step: int, epoch: float, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, epoch=f"{epoch:.2f}", text=text)
        else:
            say(f"epoch {epoch:.2f}  step {step}/{self.total_steps}  {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def without_native_messages() -> Iterator[None]:
    """Keep C++ from writing to the terminal, as torch's profiler does about its own doings."""
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
    """Keep Transformers from reports that a user can do nothing about, such as a new head's."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    # The name that all releases of version 5 know; it goes in version 6.
    warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")
    logging.disable_progress_bar()
