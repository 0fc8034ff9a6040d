"""The phases of an update (data, forward, backward, optimizer), marked in a trace and timed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from accelerate import Accelerator

from common.profile.verdict import DATA
from common.system.devices import has_timed_events, recorded_event

PHASES = (DATA, "forward", "backward", "optimizer")
Moment = torch.Event | float  # an event of the device, or seconds of the host's clock


class Phases:
    """Marks the phases of updates as ranges in the profiler's trace, and times them.

    On NVIDIA's GPUs each phase is also an NVTX range. A recipe calls nothing for this. "forward"
    begins when the loop gets a batch. "backward" is Accelerate's `backward`. Everything after it
    until the loop asks for the next batch is "optimizer": clipping, the step, and logging. If two
    networks are trained in turn, the second network's forward pass counts as "optimizer" too.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.has_nvtx = self.device.type == "cuda"
        self.has_timed_events = has_timed_events(self.device)
        self.is_on = False  # whether `watching` is open; the meter asks before it calls `enter`
        self.range: torch.profiler.record_function | None = None  # the range that is open
        self.starts: list[tuple[str | None, Moment]] = []  # each phase, and when it began

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark phases while the block runs.

        "backward" and "optimizer" are marked here, by wrapping `accelerator.backward`. The meter of
        `common.profile.waits` marks "data" and "forward" while `is_on` is true.
        """
        accelerator = self.accelerator
        backward = accelerator.backward

        def marked_backward(*args: object, **kwargs: object) -> None:
            self.enter("backward")
            backward(*args, **kwargs)
            self.enter("optimizer")

        self.is_on = True
        accelerator.backward = marked_backward
        try:
            yield
        finally:
            accelerator.backward = backward
            self.is_on = False
            self.enter(None)

    def enter(self, phase: str | None) -> None:
        """End the current phase and begin another one; None begins no phase."""
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
            if self.has_nvtx:
                torch.cuda.nvtx.range_pop()
        now: Moment = time.perf_counter()
        if self.has_timed_events:  # the host's clock misleads if the device is far behind
            now = recorded_event(self.device)
        self.starts.append((phase, now))
        if phase is not None:
            self.range = torch.profiler.record_function(phase).__enter__()
            if self.has_nvtx:
                torch.cuda.nvtx.range_push(phase)

    def milliseconds(self) -> dict[str, float]:
        """Return the total milliseconds of each phase so far, and start over.

        The device must have finished its work, or its events have no times yet.
        """
        totals = dict.fromkeys(PHASES, 0.0)
        # A phase ends where the next entry begins. An entry without a phase only ends the last
        # phase.
        for (phase, start), (_, end) in pairwise(self.starts):
            if phase is None:
                continue
            totals[phase] += milliseconds_between(start, end)
        self.starts.clear()
        return totals


def milliseconds_between(start: Moment, end: Moment) -> float:
    """Return the time between two moments, which are of the same kind."""
    if isinstance(start, (int, float)) and isinstance(end, (int, float)):
        return 1000 * (end - start)
    assert not isinstance(start, (int, float))
    assert not isinstance(end, (int, float))
    return start.elapsed_time(end)
