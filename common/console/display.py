"""The display of a run's progress on rank 0: the progress bar, or printed progress lines.

The texts of progress lines are composed in `common.track.report`.
"""

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from rich import progress
from rich.live import Live

from common.console.messages import CONSOLE, log_line, say
from common.system.launch_variables import is_main_rank

LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "wandb")  # slow imports
# The log lines that a run may print: so many at once, and so many more with each second.
LINES_AT_ONCE = 100
LINES_PER_SECOND = 5


class LineLimit:
    """Lets `LINES_AT_ONCE` lines through at once, and `LINES_PER_SECOND` more with each second.

    A run of thousands of short updates would otherwise fill a log file or a terminal.
    """

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
    """Return a bar with no task yet. `Display.begin` adds its only task, with the field `text`."""
    # Without `markup=False`, rich would take "[...]" in a text for a style.
    text = partial(progress.TextColumn, markup=False)
    return progress.Progress(
        progress.SpinnerColumn(),
        text("{task.description}"),
        progress.BarColumn(None),
        text("{task.fields[text]}"),
        progress.TimeRemainingColumn(),
    )


class Display:
    """Shows a run's progress: as a bar on a terminal, else as a printed line per log interval."""

    def __init__(self) -> None:
        self.live: Live | None = None
        self.bar = make_bar()
        self.current_activity = ""  # empty while the run trains
        self.interval_text = ""  # the figures of the last interval
        # Returns the current update and epoch. None: the training has not started.
        self.step_and_epoch: Callable[[], tuple[int, float]] | None = None
        self.total_steps = 0  # updates of the whole run, once known
        self.limit = LineLimit()

    def begin(self, activity: str = "") -> None:
        """Show the bar on a terminal, if it is not shown yet, until `close` or the process's end.

        Args:
            activity: the current activity; empty shows which library is being loaded.
        """
        self.show_activity(activity)
        if self.live is None and is_main_rank() and CONSOLE.is_terminal:
            self.bar = make_bar()
            self.bar.add_task("", total=None, text="")
            # `Live` draws in a separate thread, so no update waits for the terminal.
            self.live = Live(
                get_renderable=self.draw, console=CONSOLE, refresh_per_second=8, transient=True
            )
            self.live.start()
            atexit.register(self.close)

    def show_activity(self, activity: str) -> None:
        """Show an activity from now on, until another one is shown or the training starts."""
        self.current_activity = activity

    @contextlib.contextmanager
    def showing_activity(self, activity: str) -> Iterator[None]:
        """Show an activity while the block runs, and afterwards the earlier activity again."""
        activity_before = self.current_activity
        self.show_activity(activity)
        try:
            yield
        finally:
            self.show_activity(activity_before)

    def draw(self) -> progress.Progress:
        """Return the bar with the run's current progress; the thread of `Live` calls this."""
        task = self.bar.tasks[0]
        step_and_epoch = self.step_and_epoch
        if step_and_epoch is None:  # training has not started
            completed = 0
            description = f"{self.progress_text()} …"
            text = f"{task.elapsed or 0:.0f} s"
        else:
            completed, _ = step_and_epoch()
            description = self.progress_text()
            text = self.current_activity or self.interval_text
        self.bar.update(task.id, description=description, text=text, completed=completed)
        return self.bar

    def start(self, total_steps: int, step_and_epoch: Callable[[], tuple[int, float]]) -> None:
        """Show the progress of the training from now on.

        Args:
            total_steps: the updates of the whole run.
            step_and_epoch: returns the current update and epoch; it is called whenever the bar is
                drawn.
        """
        self.total_steps = total_steps
        self.step_and_epoch = step_and_epoch
        self.show_activity("")
        self.limit = LineLimit()
        if self.live is not None:
            step, _ = step_and_epoch()
            self.bar.update(self.bar.task_ids[0], total=total_steps, completed=step)

    def show_interval(self, text: str) -> None:
        """Show the metrics of a log interval in the bar; without a bar, print them as a line.

        In both cases, the run's log gets the line. That of the last update is always written. Other
        lines may be left out, as `LineLimit` decides.
        """
        self.interval_text = text
        is_last = self.step_and_epoch is not None and self.step_and_epoch()[0] == self.total_steps
        if not (self.limit.allows() or is_last):
            return
        write_line = say if self.live is None else log_line  # `log_line` prints nothing
        write_line(f"{self.progress_text()}  {text}")

    def progress_text(self) -> str:
        """Return the current epoch and update, or before training the current activity."""
        if self.step_and_epoch is None:
            return self.current_activity or loading_text()
        step, epoch = self.step_and_epoch()
        return f"epoch {epoch:.2f}  step {step}/{self.total_steps}"

    def close(self) -> None:
        """Remove the bar, if there is one, at the end of a run or of the process."""
        if self.live is not None:
            self.live.stop()
        self.live = None
        self.step_and_epoch = None  # a further run in this process begins without training


def loading_text() -> str:
    """Return the name of the library that is being loaded, for the progress bar."""
    # `sys.modules` is in the order of imports. So its last library was imported last, or is being
    # imported. Copy the names first, because another thread may import meanwhile.
    loaded = [name for name in list(sys.modules) if name in LIBRARIES]
    return f"loading {loaded[-1] if loaded else 'Python'}"


DISPLAY = Display()
