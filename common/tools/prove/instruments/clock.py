"""Measures the time between two log lines by a clock of its own, for comparison with the speed.

It writes an `LogInterval` at the beginning of a log line, for the time since the end of the last one.
If an evaluation or a save came between them, it writes nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from common.measure.meters import Meters
from common.run import Run
from common.tools.prove.notes import LogInterval
from common.tools.prove.session import Session


def install(session: Session) -> None:
    clock = Clock(session)
    session.wrap(Meters, "interval", clock.logging)
    session.wrap(Run, "save", clock.saving)
    session.wrap(Run, "evaluating", clock.evaluating)


class Clock:
    """Takes the time at each log line."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.began: float | None = None  # when the last log line was complete
        self.first_step = 0  # the update of that line
        self.is_pure = True  # whether there were only updates since then

    def logging(
        self, original: Callable[[Meters], dict[str, float]], meters: Meters
    ) -> dict[str, float]:
        """Note the time since the last log line."""
        now = time.perf_counter()
        step = self.session.step
        if self.began is not None and self.is_pure:
            self.session.write(LogInterval(step=step, after=self.first_step, seconds=now - self.began))
        figures = original(meters)
        self.is_pure = True
        self.first_step = step
        self.began = time.perf_counter()
        return figures

    def saving(self, original: Callable[[Run], None], run: Run) -> None:
        self.is_pure = False
        original(run)

    @contextmanager
    def evaluating(
        self,
        original: Callable[[Run, nn.Module], AbstractContextManager[nn.Module]],
        run: Run,
        model: nn.Module,
    ) -> Iterator[nn.Module]:
        self.is_pure = False
        with original(run, model) as bare_model:
            yield bare_model
