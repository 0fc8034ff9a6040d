"""Measures how long the loop waits for batches in the timed updates of a profile."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.data.samples import BatchesWithWork
from common.profile.phases import Phases
from common.profile.verdict import DATA


@dataclass
class WaitMeter:
    """Measures the waiting for batches, and marks each wait as a phase."""

    phases: Phases
    is_timing: bool = False  # whether the current updates are timed
    is_over: bool = False  # whether the profile is over, so that nothing is measured any more
    waited: float = 0.0  # seconds for which the timed updates waited for batches
    # The seconds of waiting in which batches were made, and the number of those micro-batches. One
    # wait may make the data of several micro-batches.
    making_seconds: float = 0.0
    batches_made: int = 0

    @property
    def seconds_per_batch(self) -> float:
        """The seconds of waiting for one micro-batch; 0 if none was made."""
        return self.making_seconds / max(self.batches_made, 1)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """In this context, updates are timed, so waits add to `waited`."""
        self.is_timing = True
        try:
            yield
        finally:
            self.is_timing = False

    def finish(self) -> None:
        """Measure nothing from now on, because the profile is over."""
        self.is_over = True

    def metered(
        self, batches: BatchesWithWork, batches_left: int, batches_at_once: int
    ) -> BatchesWithWork:
        """Yield batches, and note how long the loop waited for each.

        Args:
            batches: an iterator over the rest of the epoch.
            batches_left: how many batches the iterator has.
            batches_at_once: how many micro-batches the loader makes in one wait.
        """
        for position in range(batches_left):
            if self.is_over:
                break
            start = time.perf_counter()
            self.enter(DATA)
            batch = next(batches, None)
            self.enter("forward")
            if batch is None:
                return
            waited = time.perf_counter() - start
            batches_of_wait = 0
            if position % batches_at_once == 0:
                batches_of_wait = min(batches_at_once, batches_left - position)
            self.count(waited, batches_of_wait, makes_several=batches_at_once > 1)
            yield batch
        # Either the profile is over, so nothing is timed any more, or no batch is left.
        yield from batches

    def enter(self, phase: str) -> None:
        """Mark the beginning of a phase, if phases are marked now."""
        if self.phases.is_on:
            self.phases.enter(phase)

    def count(self, seconds: float, batches: int, *, makes_several: bool) -> None:
        """Count one wait for a micro-batch.

        Args:
            seconds: how long the loop waited.
            batches: how many micro-batches the loader made in this wait; 0 if an earlier wait made
                this one.
            makes_several: whether the loader makes several micro-batches in one wait.
        """
        if self.is_timing:
            self.waited += seconds
        # If the loader makes many batches at once, only some updates wait. So all waiting since
        # the first update is divided by all batches that were made: the timed updates alone might
        # contain no wait, or a wait for batches that are used after them.
        if self.is_timing or makes_several:
            self.making_seconds += seconds
            self.batches_made += batches
