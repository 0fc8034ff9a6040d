"""Measures the time in which a GPU runs kernels.

The profiler gives the start and the end of each kernel and copy. The driver's utilisation would not
do: it counts periods of about a second, and a single kernel makes the GPU look busy for a period.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from common.profile.verdict import is_kernel

Interval = tuple[float, float]  # start and end, in microseconds


class KernelTime:
    """Measures the time in which the GPU runs a kernel or a copy, during a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        activity = torch.profiler.ProfilerActivity
        on_device = [activity.CUDA] if torch.cuda.is_available() else []
        self.profile = torch.profiler.profile(activities=[activity.CPU, *on_device])

    def __enter__(self) -> KernelTime:
        """Start the profiler."""
        self.profile.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the profiler, and set `seconds`."""
        self.profile.__exit__(error_type, error, traceback)
        if error is None:
            self.seconds = union_length(kernel_intervals(self.profile.events() or [])) / 1e6


def kernel_intervals(events: Iterable[Any]) -> list[Interval]:
    """Return the interval of each kernel and copy on the device.

    Args:
        events: of torch's profiler, which has no public type for them.
    """
    return [interval_of(event) for event in events if is_kernel(event)]


def interval_of(event: Any) -> Interval:
    """Return the start and the end of a profiler's event, in microseconds."""
    return event.time_range.start, event.time_range.end


def union_length(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of the intervals; kernels of several streams overlap."""
    length = 0.0
    covered_until = float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return length
