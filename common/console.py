"""What the terminal shows, on rank 0 only."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from common.errors import is_main_rank

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
        self.task = TaskID(0)
        if is_main_rank() and CONSOLE.is_terminal:
            columns = (
                TextColumn("epoch {task.fields[epoch]}  step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]}  {task.fields[speed]}  {task.fields[memory]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=CONSOLE, refresh_per_second=4, transient=True)
            self.task = self.bar.add_task(
                "",
                total=total_steps,
                completed=first_step,
                epoch="-",
                loss="-",
                speed="",
                memory="",
            )
            self.bar.start()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one log interval."""
        epoch = f"{metrics['progress/epoch']:.2f}"
        loss = f"{metrics['train/loss']:.4f}"
        rate = metrics.get("perf/samples_per_second")
        speed = "profiling" if rate is None else f"{rate:,.0f} samples/s"
        memory = f"{peak_memory(metrics):,.0f} MiB"
        step = int(metrics["progress/global_step"])
        if self.bar is not None:
            self.bar.update(
                self.task, completed=step, epoch=epoch, loss=loss, speed=speed, memory=memory
            )
        else:
            say(
                f"epoch {epoch}  step {step}/{self.total_steps}  loss {loss}  "
                f"accuracy {metrics['train/accuracy']:.4f}  {speed}  {memory}"
            )

    def close(self) -> None:
        """Take the bar away; what was printed above it stays."""
        if self.bar is not None:
            self.bar.stop()


def peak_memory(metrics: Mapping[str, Any]) -> float:
    """Return the peak memory to show, in MiB: the device's, or the host's on a CPU."""
    return metrics.get("memory/peak_allocated_mib") or metrics["memory/host_rss_mib"]


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
