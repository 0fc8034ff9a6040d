"""The share of an update in which a GPU runs kernels.

The profiler gives the begin and end of each kernel and copy. The driver's own utilisation counts
cells of a second or so, in which a single kernel makes the GPU look busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch


class KernelTime:
    """Adds up the time in which the GPU runs a kernel or a copy, in a `with` block."""

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
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the profiler; keep the seconds of kernels."""
        self.profile.__exit__(kind, error, traceback)
        if error is None:
            self.seconds = union_length(kernel_intervals(self.profile.events() or [])) / 1e6


def kernel_intervals(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return begin and end of the device's kernels and copies, in microseconds."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of the intervals lasts; streams may overlap."""
    length = 0.0
    covered_until = float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return length
