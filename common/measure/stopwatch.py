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

# Throughput leaves out the first updates of each attempt, which also compile, tune kernels and
# allocate memory.
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

    def plus(self, other: "Interval") -> "Interval":
        """Return the sum with another interval, field by field."""
        return Interval(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

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
    """The stopwatch's part of a checkpoint: its fields, and those of its four `Interval`s."""

    first: dict[str, float]
    steady: dict[str, float]
    first_at_last_lap: dict[str, float]
    steady_at_last_lap: dict[str, float]
    earlier_seconds: float
    earlier_useful_seconds: float


@dataclass
class Stopwatch:
    """Counts the training time and work of one rank; evaluation and saving are left out.

    It counts between `start` and `stop`. A lap is the time and work between two calls of `lap`,
    which log lines make. The first updates of each attempt are counted apart from the others,
    because each attempt compiles and warms up again.
    """

    synchronize: Callable[[], None]
    clock: Callable[[], float]
    energy: Callable[[], float]  # returns the energy drawn so far, in joules
    # Both up to the last stop, and over all attempts on this number of ranks.
    first: Interval = field(default_factory=Interval)  # the first updates of each attempt
    steady: Interval = field(default_factory=Interval)  # all other updates
    # Copies of both, made at the last lap.
    first_at_last_lap: Interval = field(default_factory=Interval)
    steady_at_last_lap: Interval = field(default_factory=Interval)
    updates_of_attempt: int = 0
    # Of attempts on other numbers of ranks: the seconds of all updates, and `useful_seconds`. Their
    # work does not count, because the speed would then be a mixture.
    earlier_seconds: float = 0.0
    earlier_useful_seconds: float = 0.0
    reading_at_start: Reading | None = None  # None while the stopwatch is stopped

    @property
    def is_running(self) -> bool:
        """Whether the stopwatch counts time and work now."""
        return self.reading_at_start is not None

    @property
    def total(self) -> Interval:
        """The time and work of all updates, up to the last stop."""
        return self.first.plus(self.steady)

    @property
    def training_seconds(self) -> float:
        """The time of all updates of the run, up to the last stop."""
        return self.earlier_seconds + self.total.seconds

    @property
    def current(self) -> Interval:
        """The interval that counts now: that of the first updates, or that of the others."""
        return self.first if self.updates_of_attempt < FIRST_UPDATES else self.steady

    def start(self) -> None:
        """Wait for the device, and count from now on."""
        self.synchronize()
        self.reading_at_start = Reading(joules=self.energy(), seconds=self.clock())

    def stop(self) -> None:
        """Wait for the device, and count neither time nor work until the next start."""
        start = self.reading_at_start
        if start is not None:
            self.synchronize()
            self.current.seconds += self.clock() - start.seconds
            self.current.joules += self.energy() - start.joules
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
        interval = self.current
        interval.samples += work.samples
        interval.tokens += work.tokens
        interval.squared_tokens += work.squared_tokens
        interval.wait_seconds += wait_seconds
        interval.updates += is_update
        if is_update and self.updates_of_attempt == FIRST_UPDATES - 1:
            self.stop()  # adds the time until now to the first updates
            self.updates_of_attempt += 1
            self.start()
        else:
            self.updates_of_attempt += is_update

    def lap(self) -> Interval:
        """Return the time and work since the last lap.

        It leaves out the first updates of an attempt, unless the lap has no other updates.
        """
        with self.stopped():
            first = self.first.since(self.first_at_last_lap)
            steady = self.steady.since(self.steady_at_last_lap)
            self.first_at_last_lap = replace(self.first)
            self.steady_at_last_lap = replace(self.steady)
        return steady if steady.updates else first.plus(steady)

    @property
    def has_unlogged_updates(self) -> bool:
        """Whether updates were counted since the last lap."""
        return self.total.updates > self.first_at_last_lap.updates + self.steady_at_last_lap.updates

    @property
    def steady_interval(self) -> Interval:
        """The time and work up to the last lap, without the first updates of each attempt.

        If there are no others, it has the first updates.
        """
        if not self.steady_at_last_lap.updates:
            return self.first_at_last_lap.plus(self.steady_at_last_lap)
        return self.steady_at_last_lap

    @property
    def useful_seconds(self) -> float:
        """The seconds that all updates would have taken without compilation and warming up."""
        seconds = seconds_without_warming_up(self.first_at_last_lap, self.steady_at_last_lap)
        return self.earlier_useful_seconds + seconds

    def state_dict(self) -> StopwatchState:
        return {
            "first": asdict(self.first),
            "steady": asdict(self.steady),
            "first_at_last_lap": asdict(self.first_at_last_lap),
            "steady_at_last_lap": asdict(self.steady_at_last_lap),
            "earlier_seconds": self.earlier_seconds,
            "earlier_useful_seconds": self.earlier_useful_seconds,
        }

    def load_state_dict(self, state: StopwatchState) -> None:
        self.first = Interval.of_state(state["first"])
        self.steady = Interval.of_state(state["steady"])
        self.first_at_last_lap = Interval.of_state(state["first_at_last_lap"])
        self.steady_at_last_lap = Interval.of_state(state["steady_at_last_lap"])
        self.earlier_seconds = state["earlier_seconds"]
        self.earlier_useful_seconds = state["earlier_useful_seconds"]

    def load_times(self, state: StopwatchState) -> None:
        """Restore the times alone, from a run that had another number of ranks."""
        first = Interval.of_state(state["first"])
        steady = Interval.of_state(state["steady"])
        self.earlier_seconds = state["earlier_seconds"] + first.seconds + steady.seconds
        useful_seconds = seconds_without_warming_up(first, steady)
        self.earlier_useful_seconds = state["earlier_useful_seconds"] + useful_seconds


def seconds_without_warming_up(first: Interval, steady: Interval) -> float:
    """Return the seconds that updates would have taken without compilation and warming up.

    Args:
        first: the first updates of each attempt.
        steady: all other updates.
    """
    if not steady.updates:
        return first.seconds + steady.seconds
    # Without warming up, the first updates would have taken as long as the others, but no longer
    # than they did take.
    first_seconds = first.updates * steady.seconds / steady.updates
    return steady.seconds + min(first_seconds, first.seconds)


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
