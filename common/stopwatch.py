"""Time between synchronised points, and what was done in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

# Compilation, autotuning and allocation fall into the first updates: throughput starts after.
FIRST_UPDATES = 3


@dataclass
class Interval:
    """What one rank did between two synchronised points."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    updates: int = 0
    samples: int = 0
    tokens: int = 0

    def add(self, other: Interval) -> None:
        """Add the counts of another interval."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Stopwatch:
    """Splits the training time of one rank into intervals; evaluation and saving are left out.

    Throughput counts from `FIRST_UPDATES` on, unless the run ends before.
    """

    synchronize: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    current: Interval = field(default_factory=Interval)
    first: Interval = field(default_factory=Interval)
    steady: Interval = field(default_factory=Interval)
    early: Interval = field(default_factory=Interval)  # of `current`, what belongs to `first`
    started: float | None = None

    def start(self) -> None:
        """Let time count from now on."""
        self.synchronize()
        self.started = self.clock()

    def stop(self) -> None:
        """Let time count no longer, until `start`."""
        if self.started is not None:
            self.synchronize()
            self.current.seconds += self.clock() - self.started
            self.started = None

    def count(self, samples: int, tokens: int, wait_seconds: float, is_update: bool) -> None:
        """Count a micro-batch that was trained on, and the time spent waiting for it."""
        current = self.current
        current.samples += samples
        current.tokens += tokens
        current.wait_seconds += wait_seconds
        if is_update:
            current.updates += 1
            if self.first.updates + current.updates == FIRST_UPDATES:
                self.stop()
                self.early = replace(current)
                self.start()

    def lap(self) -> Interval:
        """End the current interval and return it; time goes on counting if it did.

        Of an interval in which the first updates end, what comes after them is returned.
        """
        running = self.started is not None
        self.stop()
        lap, early = self.current, self.early
        self.current, self.early = Interval(), Interval()
        late = Interval(*(whole - vars(early)[name] for name, whole in vars(lap).items()))
        if early.updates:
            self.first.add(early)
            self.steady.add(late)
        else:
            (self.first if self.first.updates < FIRST_UPDATES else self.steady).add(lap)
        if running:
            self.start()
        return late if early.updates and late.updates else lap

    @property
    def whole_run(self) -> Interval:
        """The time that throughput of the run is counted over."""
        return self.steady if self.steady.updates else self.first

    @property
    def train_seconds(self) -> float:
        """Time spent in training steps, the first ones included."""
        return self.first.seconds + self.steady.seconds


def throughput(intervals: torch.Tensor) -> dict[str, float]:
    """Return the ``perf/`` metrics of all ranks' intervals.

    Args:
        intervals: float64 [world_size, 5]: the fields of `Interval`, one row a rank.
    """
    seconds = max(float(intervals[:, 0].max()), 1e-9)
    updates = max(int(intervals[0, 2]), 1)
    samples = float(intervals[:, 3].sum())
    metrics = {
        "perf/samples_per_second": samples / seconds,
        "perf/samples_per_second_per_device": samples / seconds / len(intervals),
        "perf/step_milliseconds": 1000 * seconds / updates,
        "perf/data_wait_fraction": float((intervals[:, 1] / intervals[:, 0].clamp(min=1e-9)).max()),
    }
    if tokens := float(intervals[:, 4].sum()):
        metrics["perf/tokens_per_second"] = tokens / seconds
    return metrics


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`, so that a clock read next tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
