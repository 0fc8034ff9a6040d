"""Time between synchronised points, and what was done in it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from common.data.batch import Work
from common.devices import synchronize_stream
from common.measure.flops import TrainingFlops

# Compilation, autotuning and allocation fall into the first updates: throughput starts after.
FIRST_UPDATES = 3


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

    def since(self, earlier: "Interval") -> "Interval":
        return Interval(*(now - vars(earlier)[name] for name, now in vars(self).items()))


@dataclass
class Stopwatch:
    """Counts the training time of one rank; evaluation and saving are left out."""

    synchronize: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    energy: Callable[[], float] = lambda: 0.0  # drawn so far, in joules
    total: Interval = field(default_factory=Interval)  # of all updates, up to the last stop
    first: Interval = field(default_factory=Interval)  # `total` after the first updates
    marked: Interval = field(default_factory=Interval)  # `total` at the last lap
    started: tuple[float, float] | None = None  # what energy and clock said then

    def start(self) -> None:
        self.synchronize()
        self.started = self.energy(), self.clock()

    def stop(self) -> None:
        """Count nothing until the next start: neither time, nor what is trained on."""
        if self.started is not None:
            self.synchronize()
            self.total.seconds += self.clock() - self.started[1]
            self.total.joules += self.energy() - self.started[0]
            self.started = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what happens within, and then go on as before."""
        running = self.started is not None
        self.stop()
        yield
        if running:
            self.start()

    def count(self, work: Work, wait_seconds: float, is_update: bool) -> None:
        if self.started is None:
            return
        total = self.total
        total.samples += work.samples
        total.tokens += work.tokens
        total.squared_tokens += work.squared_tokens
        total.wait_seconds += wait_seconds
        total.updates += is_update
        if is_update and total.updates == FIRST_UPDATES:
            with self.stopped():
                self.first = replace(total)

    def lap(self) -> Interval:
        """Return what was counted since the last lap, or the first updates if they end in it."""
        with self.stopped():
            warmed_up = self.marked.updates < FIRST_UPDATES < self.total.updates
            since, self.marked = self.first if warmed_up else self.marked, replace(self.total)
        return self.marked.since(since)

    @property
    def whole_run(self) -> Interval:
        """What was counted after the first updates, if there is more, up to the last lap."""
        late = self.marked.updates > FIRST_UPDATES
        return self.marked.since(self.first) if late else self.marked

    @property
    def useful_seconds(self) -> float:
        """Time that the updates would have taken without compilation and warming up."""
        steady = self.whole_run
        if steady is self.marked:
            return steady.seconds
        first = FIRST_UPDATES * steady.seconds / steady.updates
        return steady.seconds + min(first, self.first.seconds)

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {name: asdict(getattr(self, name)) for name in ("total", "first", "marked")}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        for name in ("total", "first", "marked"):
            setattr(self, name, Interval(*(state[name][one.name] for one in fields(Interval))))


class RunClock:
    """Seconds since a run began, its earlier attempts among them, whatever the time of day is.

    The time between two attempts counts as well, if they ran on one machine that was not started
    anew meanwhile. Elsewhere it is not known, and left out.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()  # the machine's own clock, which nobody sets

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "began": self.began, "boot": boot_id()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        now, boot = time.monotonic(), boot_id()
        seconds = float(state.get("seconds", 0.0))  # an older version kept another clock
        if boot is not None and state.get("boot") == boot:
            seconds = max(seconds, now - float(state["began"]))
        self.began = now - max(seconds, 0.0)


def boot_id() -> str | None:
    """Return what names the time since this machine was started, where the system tells it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def throughput(
    intervals: torch.Tensor, flops: TrainingFlops | None = None, peak: float = 0.0
) -> dict[str, float]:
    """Return the ``perf/`` metrics of [world_size, 7], an `Interval` a rank; `peak` in TFLOP/s."""
    total, devices = Interval(*intervals.sum(0).tolist()), len(intervals)
    time_of_each = intervals[:, 0].clamp(min=1e-9)
    seconds = float(time_of_each.max())
    rate = total.samples / seconds
    metrics = {
        "perf/samples_per_second": rate,
        "perf/samples_per_second_per_device": rate / devices,
        "perf/step_milliseconds": 1000 * seconds * devices / max(total.updates, devices),
        "perf/data_wait_fraction": float((intervals[:, 1] / time_of_each).max()),
    }
    if total.tokens:
        metrics["perf/tokens_per_second"] = total.tokens / seconds
    if flops is not None:
        operations = flops.total(total.samples, total.tokens, total.squared_tokens)
        metrics["perf/tflops_per_device"] = tflops = operations / seconds / devices / 1e12
        if peak:
            metrics["perf/mfu"] = tflops / peak
    if total.joules and total.samples:
        metrics["perf/joules_per_sample"] = total.joules / total.samples
    return metrics


def synchronize(device: torch.device) -> None:
    """Wait for training's work on `device`, not for streams that still copy a checkpoint."""
    synchronize_stream(device)
