"""Time between synchronised points, and what was done in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from common.flops import TrainingFlops

# Compilation, autotuning and allocation fall into the first updates: throughput starts after.
FIRST_UPDATES = 3


class Work(NamedTuple):
    """What a micro-batch holds."""

    samples: int
    tokens: int = 0
    squared_tokens: int = 0


@dataclass
class Interval:
    """What one rank did between two synchronised points."""

    seconds: float = 0.0
    wait_seconds: float = 0.0  # for batches
    joules: float = 0.0  # drawn by the GPU, where that is known
    updates: float = 0
    samples: float = 0
    tokens: float = 0  # real ones, without padding
    squared_tokens: float = 0  # sum over samples of the square of their tokens

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
    energy: Callable[[], float] = lambda: 0.0  # drawn so far, in joules
    joules_before: float = 0.0
    paused: bool = False

    def pause(self) -> None:
        """Leave updates out, their samples too, until `resume`."""
        self.stop()
        self.paused = True

    def resume(self) -> None:
        """Count again."""
        self.paused = False
        self.start()

    def start(self) -> None:
        """Let time count from now on."""
        if self.paused:
            return
        self.synchronize()
        self.joules_before = self.energy()
        self.started = self.clock()

    def stop(self) -> None:
        """Let time count no longer, until `start`."""
        if self.started is not None:
            self.synchronize()
            self.current.seconds += self.clock() - self.started
            self.current.joules += self.energy() - self.joules_before
            self.started = None

    def count(self, work: Work, wait_seconds: float, is_update: bool) -> None:
        """Count a micro-batch that was trained on, and the time spent waiting for it."""
        if self.paused:
            return
        current = self.current
        current.samples += work.samples
        current.tokens += work.tokens
        current.squared_tokens += work.squared_tokens
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
        """Time spent in training steps, the first ones included, up to the last stop."""
        return self.first.seconds + self.steady.seconds + self.current.seconds

    @property
    def useful_seconds(self) -> float:
        """Time that the updates would have taken without compilation and warming up."""
        if not self.steady.updates:
            return self.first.seconds
        per_update = self.steady.seconds / self.steady.updates
        return self.steady.seconds + self.first.updates * min(
            per_update, self.first.seconds / max(self.first.updates, 1)
        )


def throughput(
    intervals: torch.Tensor, flops: TrainingFlops | None = None, peak: float = 0.0
) -> dict[str, float]:
    """Return the ``perf/`` metrics of all ranks' intervals.

    Args:
        intervals: float64 [world_size, 7]: the fields of `Interval`, one row a rank.
        flops: of the model; None where they could not be counted.
        peak: of one device's matrix products, in TFLOP/s.
    """
    total = Interval(*intervals.sum(0).tolist())
    seconds = max(float(intervals[:, 0].max()), 1e-9)
    updates = max(float(intervals[0, 3]), 1.0)
    samples, devices = total.samples, len(intervals)
    metrics = {
        "perf/samples_per_second": samples / seconds,
        "perf/samples_per_second_per_device": samples / seconds / devices,
        "perf/step_milliseconds": 1000 * seconds / updates,
        "perf/data_wait_fraction": float((intervals[:, 1] / intervals[:, 0].clamp(min=1e-9)).max()),
    }
    if total.tokens:
        metrics["perf/tokens_per_second"] = total.tokens / seconds
    if flops is not None:
        operations = flops.total(samples, total.tokens, total.squared_tokens)
        metrics["perf/tflops_per_device"] = operations / seconds / devices / 1e12
        metrics["perf/mfu"] = metrics["perf/tflops_per_device"] / peak
    if total.joules and samples:
        metrics["perf/joules_per_sample"] = total.joules / samples
    return metrics


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`, so that a clock read next tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
