"""What an update is doing: named ranges in a trace, and the time of each."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator

from common.devices import has_timed_events, recorded_event
from common.profile.verdict import DATA

PHASES = (DATA, "forward", "backward", "optimizer")


class Phases:
    """The phases of updates: each is a range in the profiler's trace, on NVIDIA's GPUs NVTX's too.

    A recipe calls nothing for it. Forward begins with a batch, backward is Accelerate's, and what
    is left until the next batch is the optimizer's: clipping, its step, what is noted for the log.
    (Of two networks that are trained in turn, the second forward is in the first optimizer's.)
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.has_nvtx = self.device.type == "cuda"
        self.times_device = has_timed_events(self.device)
        self.is_on = False
        self.range: Any = None
        self.stamps: list[tuple[str | None, Any]] = []  # a phase, and when it began

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note phases from now on: of updates outside, nothing is wrapped."""
        accelerator: Any = self.accelerator
        backward, self.is_on = accelerator.backward, True

        def noted(*arguments: Any, **others: Any) -> None:
            self.enter("backward")
            backward(*arguments, **others)
            self.enter("optimizer")

        accelerator.backward = noted
        try:
            yield
        finally:
            accelerator.backward, self.is_on = backward, False
            self.enter(None)

    def enter(self, phase: str | None) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
            if self.has_nvtx:
                torch.cuda.nvtx.range_pop()
        now: Any = time.perf_counter()
        if self.times_device:  # of its stream, which may be far behind
            now = recorded_event(self.device)
        self.stamps.append((phase, now))
        if phase is not None:
            self.range = torch.profiler.record_function(phase).__enter__()
            if self.has_nvtx:
                torch.cuda.nvtx.range_push(phase)

    def milliseconds(self) -> dict[str, float]:
        """Return the time of each phase so far, and forget it; the device must have caught up."""
        spent = dict.fromkeys(PHASES, 0.0)
        for (phase, began), (_, ended) in pairwise(self.stamps):
            if phase is not None:
                spent[phase] += (
                    began.elapsed_time(ended) if self.times_device else 1000 * (ended - began)
                )
        self.stamps.clear()
        return spent
