"""Measures the time between two log lines, for comparison with the logged speed.

At the beginning of a log line, it writes a `LogInterval` with the time since the end of the last
log line. If there was an evaluation or a save between them, it writes nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from common.lifecycle import saving
from common.lifecycle.stages import StartedRun
from common.measure.meters import Meters
from common.run import Run
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import LogInterval


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    clock = Clock(session)
    session.wrap(Meters, "end_interval", clock.around_end_interval)
    session.wrap(saving, "save", clock.around_save)
    session.wrap(Run, "evaluating", clock.around_evaluating)


class Clock:
    """Measures the time between log lines."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # The time at the end of the last log line; None before the first one.
        self.last_log_time: float | None = None
        self.last_log_step = 0  # the update of that line
        self.has_only_updates = True  # whether there were only updates since then

    def around_end_interval(
        self, original: Callable[[Meters], dict[str, float]], meters: Meters
    ) -> dict[str, float]:
        """Write the time since the last log line."""
        now = time.perf_counter()
        step = self.session.step
        if self.last_log_time is not None and self.has_only_updates:
            seconds = now - self.last_log_time
            self.session.write(
                LogInterval(step=step, previous_step=self.last_log_step, seconds=seconds)
            )
        figures = original(meters)
        self.has_only_updates = True
        self.last_log_step = step
        self.last_log_time = time.perf_counter()
        return figures

    def around_save(self, original: Callable[[StartedRun], None], started: StartedRun) -> None:
        self.has_only_updates = False
        original(started)

    @contextmanager
    def around_evaluating(
        self,
        original: Callable[[Run, nn.Module], AbstractContextManager[nn.Module]],
        run: Run,
        model: nn.Module,
    ) -> Iterator[nn.Module]:
        self.has_only_updates = False
        with original(run, model) as bare_model:
            yield bare_model
