"""A run's figures: speed, memory, loss and metrics, gathered from all ranks."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from common.console import warn
from common.data.batch import Samples, Work
from common.machine import usable_cores
from common.measure.flops import (
    ComputeLoss,
    TrainingFlops,
    training_flops,
    training_flops_of_values,
)
from common.measure.memory import MEBIBYTE, memory_now, memory_used, peaks
from common.measure.peak import PowerMeter, peak_tflops
from common.measure.stopwatch import Interval, RunClock, Stopwatch, synchronize, throughput
from common.measure.sums import Metrics, TrainingSums

LEAST_SECONDS = 2  # that are judged
SMALL_SHARE = 0.7  # of the time that threads ask for: alone they get 0.9 or more
HIGH_LOAD = 1.5  # programs that want to run, for each core
# Log lines in a row at which more memory is held, by the share below. As many at the beginning say
# nothing: libraries fill what they keep.
RISES = 10
LEAST_RISE = 0.05
BUSY_SHARE = 0.8  # of the time, that a GPU has something to do where nothing holds it up


class Meters:
    """Counts on each rank without synchronising; gathers at the log interval and at the end."""

    def __init__(self, accelerator: Accelerator, accumulation: int) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.sums = TrainingSums(self.device, accumulation)
        self.power = PowerMeter(self.device)
        self.stopwatch = Stopwatch(partial(synchronize, self.device), energy=self.power.joules)
        self.clock = RunClock()
        self.flops: TrainingFlops | None = None
        self.peak, self.peak_source = 0.0, ""  # TFLOP/s of a device
        self.clocks = time.perf_counter(), time.process_time()  # at the last log line
        self.is_warned = False
        self.held: dict[str, deque[float]] = {}  # memory in MiB at the last log lines, by whose
        self.busy: list[float] = []  # share of each interval in which the GPUs computed

    def find_flops(
        self, model: nn.Module, compute_loss: ComputeLoss, samples: Samples, dtype: torch.dtype
    ) -> None:
        """Find the operations, and the peak in `dtype`: without them, training has no MFU."""
        self.peak, self.peak_source = peak_tflops(self.device, dtype)
        try:
            self.flops = training_flops(model, compute_loss, samples)
        except Exception as problem:
            with contextlib.suppress(Exception):  # as the model may do anything
                self.flops = training_flops_of_values(model, compute_loss, samples, self.device)
            if self.flops is None:
                reason = str(problem).partition("\n")[0]
                warn(f"no perf/mfu: FLOPs can't be counted ({type(problem).__name__}: {reason})")

    def accumulate(self, accumulation: int) -> None:
        self.sums = TrainingSums(self.device, accumulation)

    def count(
        self,
        loss: Tensor | float,
        metrics: Metrics | None,
        work: Work,
        waited: float,
        is_update: bool,
    ) -> None:
        """Take note of a micro-batch that was trained on, and whether an update ended with it."""
        self.sums.add(loss, metrics or {})
        self.stopwatch.count(work, waited, is_update)
        self.power.sample_if_due()

    def interval(self) -> dict[str, float]:
        """Return the ``train/``, ``perf/`` and ``memory/`` metrics of all ranks' last interval."""
        self.warn_of_contention()
        with self.stopwatch.stopped():
            used = memory_used(self.device) | self.power.readings()
            self.warn_of_rising(used["memory/host_rss_mib"])
            taken = self.sums.take()
            row = self.sums.row(taken)
            figures, rows = self.of_all_ranks(self.stopwatch.lap(), used, row)
            if rows[:, 0].any():  # a rank has metrics that the ranks have not agreed on
                self.sums.agree_on_names(self.accelerator, taken)
                rows = self.gather_rows(self.sums.row(taken))
            self.busy += [figures[name] for name in ("gpu/utilization",) if name in figures]
            return {**self.sums.means(rows), **figures, "perf/goodput": self.goodput()}

    def whole_run(self) -> dict[str, float]:
        """Return the last update's loss, and ``perf/`` and the ``memory/`` peaks of all the run."""
        used = memory_used(self.device)
        used["memory/host_rss_mib"] = peaks(torch.device("cpu"))[0] / MEBIBYTE
        last_loss = [self.sums.last_loss()]
        figures, losses = self.of_all_ranks(self.stopwatch.whole_run, used, last_loss)
        return {**figures, "train/loss": float(losses.mean())}

    def of_all_ranks(
        self, interval: Interval, used: Mapping[str, float], numbers: list[float]
    ) -> tuple[dict[str, float], Tensor]:
        """Return figures, with the most that ranks `used`, and all `numbers` [world_size, n]."""
        parts = [[*vars(interval).values()], [*used.values()], numbers]
        row = [number for part in parts for number in part]
        ranks = self.gather_rows(row).split([*map(len, parts)], dim=1)
        # No speed of an interval whose updates were all profiled.
        figures = throughput(ranks[0], self.flops, self.peak) if interval.updates else {}
        figures |= dict(zip(used, ranks[1].amax(0).tolist(), strict=True))
        if (name := "gpu/utilization") in used:
            each = ranks[1][:, [*used].index(name)]
            figures |= {name: float(each.mean()), f"{name}_min": float(each.min())}
        # What a GPU's driver does not tell, of one rank at least, is missing.
        return {name: value for name, value in figures.items() if value == value}, ranks[2]

    def gather_rows(self, row: list[float]) -> Tensor:
        """Return the rows of all ranks, float64 [world_size, n], on the host."""
        mine = torch.tensor([row], dtype=torch.float64)
        return self.accelerator.gather(mine.to(self.device)).cpu()

    def idle_sentence(self) -> str | None:
        """Return what to do where the GPUs had less to do than they could, or None."""
        steady = self.busy[1:]  # compilation falls into the first interval
        if not steady or (share := mean(steady)) >= BUSY_SHARE:
            return None
        return (
            f"the GPUs computed for {share:.0%} of the time: try a larger --batch-size, --compile, "
            "or more --num-workers; --profile says what holds them up"
        )

    def warn_of_contention(self) -> None:
        """Say once, on a CPU, where other programs make the run slow."""
        before, self.clocks = self.clocks, (time.perf_counter(), time.process_time())
        wall, cpu = (now - then for now, then in zip(self.clocks, before, strict=True))
        if not self.is_warned and self.device.type == "cpu":
            figures = torch.get_num_threads(), usable_cores(), os.getloadavg()[0]
            if sentence := contention_sentence(wall, cpu, *figures):
                self.is_warned = True
                warn(sentence)

    def warn_of_rising(self, host: float) -> None:
        """Say once whose memory, in MiB, has risen from one log line to the next for long."""
        now = {"the process": host}
        if self.device.type == "cuda":
            now["the GPU"] = memory_now(self.device) / MEBIBYTE
        for owner, size in now.items():
            held = self.held.setdefault(owner, deque(maxlen=2 * RISES))
            if not held or held[-1] > 0:  # else it was said
                held.append(size)
            if sentence := rising_sentence(owner, [*held][RISES:]):
                held.append(0.0)
                warn(sentence)

    def goodput(self) -> float:
        """Return training steps' share, without compilation, of the time since the run began."""
        useful = self.stopwatch.useful_seconds
        return useful / max(self.clock.seconds, useful, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        parts = {"stopwatch": self.stopwatch.state_dict(), "sums": self.sums.state_dict()}
        return {**parts, "clock": self.clock.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.sums.load_from_ranks([state["sums"]])
        self.clock.load_state_dict(state.get("clock", {}))

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sums of another number of ranks; their times say nothing here."""
        self.clock.load_state_dict(states[0].get("clock", {}))
        if self.accelerator.is_main_process:
            self.sums.load_from_ranks([state["sums"] for state in states])


def rising_sentence(owner: str, held: Sequence[float]) -> str | None:
    """Return what to look for where memory, in MiB at log lines, rises on; else None."""
    is_rising = all(more > less for less, more in pairwise(held))
    if len(held) < RISES or not is_rising or held[-1] < (1 + LEAST_RISE) * held[0]:
        return None
    return (
        f"the memory of {owner} rose at {RISES} log lines in a row, from {held[0]:,.0f} to "
        f"{held[-1]:,.0f} MiB: look for what is kept of each update, such as a loss that was not "
        "detached (mapped files count, too, while they are read for the first time)"
    )


def contention_sentence(
    wall_seconds: float, cpu_seconds: float, threads: int, cores: int, load: float
) -> str | None:
    """Return what slows training down and what to do, or None where nothing of the kind is seen.

    A small share of CPU time (of all the process's threads) may be waiting for data, and a high
    load average other ranks or loader workers: both together are threads that wait for a core.
    """
    share = cpu_seconds / max(wall_seconds * threads, 1e-9)
    if wall_seconds < LEAST_SECONDS or load < HIGH_LOAD * cores or share >= SMALL_SHARE:
        return None
    seen = f"other programs use the same cores (load {load:.1f} on {cores})"
    if threads == 1:
        return f"{seen}: this process gets {share:.0%} of one"
    return (
        f"{seen}: {threads} threads get {share:.0%} of the time they ask for and spend it waiting "
        "for each other; --num-threads 1 made a step of ResNet six times faster"
    )
