"""Measures training time between points at which the device is synchronised, and the throughput."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import NamedTuple, TypedDict

import torch

from common.data.samples import Work
from common.measure.flops import TrainingFlops
from common.metric_names import (
    DATA_WAIT,
    JOULES_PER_SAMPLE,
    MFU,
    STEP_MILLISECONDS,
    TFLOPS_PER_DEVICE,
    THROUGHPUT,
    THROUGHPUT_PER_DEVICE,
    TOKEN_THROUGHPUT,
)

# Throughput leaves out the first updates, which also compile, tune kernels and allocate memory.
FIRST_UPDATES = 3


@dataclass
class Interval:
    """The time and the work of one rank between two synchronised points."""

    seconds: float = 0.0
    wait_seconds: float = 0.0  # seconds in which the loop waited for batches
    joules: float = 0.0  # energy drawn by the GPU, if known
    updates: float = 0
    samples: float = 0
    tokens: float = 0  # without padding
    squared_tokens: float = 0  # sum over samples of the square of their tokens

    @classmethod
    def of_state(cls, state: Mapping[str, float]) -> "Interval":
        """Return an interval from its saved fields."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})

    def since(self, earlier: "Interval") -> "Interval":
        """Return the difference to an earlier count, field by field."""
        differences = {}
        for name, value in vars(self).items():
            differences[name] = value - getattr(earlier, name)
        return Interval(**differences)


class Reading(NamedTuple):
    """What the meters of a stopwatch show at one moment."""

    joules: float  # the energy drawn so far
    seconds: float  # the clock


class StopwatchState(TypedDict):
    """The stopwatch's part of a checkpoint: the fields of three `Interval`s."""

    total: dict[str, float]
    first: dict[str, float]  # `total_after_first_updates`
    marked: dict[str, float]  # `total_at_last_lap`


@dataclass
class Stopwatch:
    """Counts the training time and work of one rank; evaluation and saving are left out.

    It counts between `start` and `stop`. A lap is the time and work between two calls of `lap`,
    which log lines make.
    """

    synchronize: Callable[[], None]
    clock: Callable[[], float]
    energy: Callable[[], float]  # returns the energy drawn so far, in joules
    total: Interval = field(default_factory=Interval)  # all updates, up to the last stop
    # Copies of `total`, made when the first updates were over, and at the last lap.
    total_after_first_updates: Interval = field(default_factory=Interval)
    total_at_last_lap: Interval = field(default_factory=Interval)
    reading_at_start: Reading | None = None  # None while the stopwatch is stopped

    @property
    def is_running(self) -> bool:
        """Whether the stopwatch counts time and work now."""
        return self.reading_at_start is not None

    def start(self) -> None:
        """Wait for the device, and count from now on."""
        self.synchronize()
        self.reading_at_start = Reading(joules=self.energy(), seconds=self.clock())

    def stop(self) -> None:
        """Wait for the device, and count neither time nor work until the next start."""
        start = self.reading_at_start
        if start is not None:
            self.synchronize()
            self.total.seconds += self.clock() - start.seconds
            self.total.joules += self.energy() - start.joules
            self.reading_at_start = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out the time and work of the block, and then go on as before."""
        was_running = self.is_running
        self.stop()
        yield
        if was_running:
            self.start()

    def count(self, work: Work, wait_seconds: float, is_update: bool) -> None:
        """Count a micro-batch, if the stopwatch is running.

        Args:
            wait_seconds: the time for which the loop waited for the micro-batch.
            is_update: whether an update ended with the micro-batch.
        """
        if not self.is_running:
            return
        total = self.total
        total.samples += work.samples
        total.tokens += work.tokens
        total.squared_tokens += work.squared_tokens
        total.wait_seconds += wait_seconds
        total.updates += is_update
        if is_update and total.updates == FIRST_UPDATES:
            # Stopping adds the time until now to `total`, so that the copy includes it.
            with self.stopped():
                self.total_after_first_updates = replace(total)

    def lap(self) -> Interval:
        """Return the time and work since the last lap.

        A lap in which the first updates ended leaves them out, unless it has no other updates.
        """
        with self.stopped():
            beginning = self.total_at_last_lap
            if beginning.updates < FIRST_UPDATES < self.total.updates:
                beginning = self.total_after_first_updates
            self.total_at_last_lap = replace(self.total)
        return self.total_at_last_lap.since(beginning)

    @property
    def steady_interval(self) -> Interval:
        """The time and work up to the last lap, without the first updates.

        If there are no others, it has the first updates.
        """
        if not self.has_steady_updates:
            return self.total_at_last_lap
        return self.total_at_last_lap.since(self.total_after_first_updates)

    @property
    def has_steady_updates(self) -> bool:
        """Whether the laps so far have updates after the first ones."""
        return self.total_at_last_lap.updates > FIRST_UPDATES

    @property
    def useful_seconds(self) -> float:
        """The seconds that all updates would have taken without compilation and warming up."""
        if not self.has_steady_updates:
            return self.total_at_last_lap.seconds
        steady = self.steady_interval
        # Without warming up, the first updates would have taken as long as the others, but no
        # longer than they did take.
        first_seconds = FIRST_UPDATES * steady.seconds / steady.updates
        return steady.seconds + min(first_seconds, self.total_after_first_updates.seconds)

    def state_dict(self) -> StopwatchState:
        return {
            "total": asdict(self.total),
            "first": asdict(self.total_after_first_updates),
            "marked": asdict(self.total_at_last_lap),
        }

    def load_state_dict(self, state: StopwatchState) -> None:
        self.total = Interval.of_state(state["total"])
        self.total_after_first_updates = Interval.of_state(state["first"])
        self.total_at_last_lap = Interval.of_state(state["marked"])


def throughput(
    intervals: torch.Tensor, flops: TrainingFlops | None, peak: float
) -> dict[str, float]:
    """Return the ``perf/`` metrics of one interval over all ranks.

    Args:
        intervals: float64 [world_size, 7], the fields of each rank's `Interval`.
        flops: the operations of a sample; None: there are no TFLOP/s and no MFU.
        peak: the most TFLOP/s that a device can do; 0 if unknown: there is no MFU.
    """
    total = Interval(*intervals.sum(0).tolist())
    devices = len(intervals)
    # The columns are in the order of `Interval`.
    seconds_of_ranks = intervals[:, 0].clamp(min=1e-9)
    wait_seconds_of_ranks = intervals[:, 1]
    seconds = float(seconds_of_ranks.max())
    rate = total.samples / seconds
    updates = max(total.updates / devices, 1)  # each device counts every update
    metrics = {
        THROUGHPUT: rate,
        THROUGHPUT_PER_DEVICE: rate / devices,
        STEP_MILLISECONDS: 1000 * seconds / updates,
        DATA_WAIT: float((wait_seconds_of_ranks / seconds_of_ranks).max()),
    }
    if total.tokens:
        metrics[TOKEN_THROUGHPUT] = total.tokens / seconds
    if flops is not None:
        operations = flops.total(total.samples, total.tokens, total.squared_tokens)
        tflops = operations / seconds / devices / 1e12
        metrics[TFLOPS_PER_DEVICE] = tflops
        if peak:
            metrics[MFU] = tflops / peak
    if total.joules and total.samples:
        metrics[JOULES_PER_SAMPLE] = total.joules / total.samples
    return metrics
