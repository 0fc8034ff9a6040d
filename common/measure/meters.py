"""Computes the figures of each log line: loss, metrics, speed and memory over all ranks."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import TypedDict

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from common.console import warn
from common.data.samples import Samples, Work
from common.failures.sentences import cause_text
from common.failures.user_frames import user_line_of
from common.measure.compile_time import CompileTime
from common.measure.contention import ContentionWatch
from common.measure.flops import ComputeLoss, TrainingFlops, flops_of_sample
from common.measure.machine_load import MachineLoad, other_cpu_fraction
from common.measure.memory import MEBIBYTE, memory_used, peaks
from common.measure.peak import peak_tflops
from common.measure.power import PowerMeter
from common.measure.rising_memory import RisingMemoryWatch
from common.measure.run_clock import ClockState, RunClock
from common.measure.stopwatch import Interval, Stopwatch, StopwatchState, throughput
from common.measure.training_sums import TrainingSums, TrainingSumsState
from common.measure.value_checks import Metrics, require_loss_and_metrics
from common.metric_names import (
    GOODPUT,
    GPU_UTILIZATION,
    HOST_MEMORY,
    MFU,
    MIN_GPU_UTILIZATION,
    OTHER_CPU,
    TRAINING_LOSS,
)
from common.ranks.agreement import gather_numbers
from common.system.devices import synchronize_stream
from common.system.launch_variables import local_world_size

BUSY_SHARE = 0.8  # share of the time; a GPU that nothing holds up is busy for a larger share
# If two measured peaks differ by more than this factor, they are of different devices. Those of one
# device differ too, for example under load, but by less.
OTHER_DEVICE_RATIO = 1.5


class MetersState(TypedDict):
    """The meters' part of a checkpoint."""

    stopwatch: StopwatchState
    sums: TrainingSumsState
    clock: ClockState
    compile_time: dict[str, float]  # that of `CompileTime`
    peak: float  # TFLOP/s of the device; 0 if unknown
    load: dict[str, float]  # the fields of `CpuTimes`


class Meters:
    """Measures training on one rank, and gathers the figures of all ranks.

    `count` is called for each micro-batch and never waits for the device. `end_interval` and
    `whole_run_figures` wait for the device and the other ranks, at a log line and at the end.
    """

    def __init__(self, accelerator: Accelerator, accumulation: int) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.sums = TrainingSums(self.device, accumulation)
        self.power = PowerMeter(self.device)
        self.stopwatch = Stopwatch(
            partial(synchronize_stream, self.device), time.perf_counter, self.power.joules
        )
        self.clock = RunClock()
        self.compile_time = CompileTime()
        self.load = MachineLoad()
        self.flops: TrainingFlops | None = None
        self.cause_of_no_mfu: str | None = None  # until the first update, when a warning states it
        self.peak = 0.0  # TFLOP/s of a device; 0 if unknown
        self.peak_source = ""  # "data sheet", "measured" or "unknown"; see `peak_tflops`
        self.peak_before = 0.0  # the peak in the attempt before this one; 0 if there was none
        self.contention = ContentionWatch(self.device)
        self.rising_memory = RisingMemoryWatch(self.device)
        # For each interval, the mean utilisation of all GPUs, from 0 to 1.
        self.utilizations: list[float] = []

    def find_flops(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        samples: Samples,
        dtype: torch.dtype,
        passes: int = 1,
    ) -> None:
        """Count the operations of a sample, and find the device's peak in `dtype`, for the MFU.

        If they can't be counted, there is no MFU, and a warning gives the cause after the first
        update. Before it, the cause may be a mistake in the recipe, which the loop meets as well
        and reports better.

        Args:
            passes: how many forward and backward passes the loop makes with each sample.
        """
        self.peak, self.peak_source = peak_tflops(self.device, dtype)
        try:
            flops = flops_of_sample(model, compute_loss, samples, self.device)
        except Exception as error:  # a recipe's model may raise anything
            self.cause_of_no_mfu = cause_in_recipe(error)
            return
        self.flops = flops.times(passes)

    def use_accumulation(self, accumulation: int) -> None:
        """Prepare for updates of `accumulation` micro-batches, before the first is counted.

        `--auto-batch-size` chooses this number after the meters have been made.
        """
        self.sums = TrainingSums(self.device, accumulation)

    def start(self) -> None:
        """Count time, work and the machine's load from now on."""
        self.load.start()
        self.stopwatch.start()

    def count(
        self,
        loss: Tensor | float,
        metrics: Metrics | None,
        work: Work,
        wait_seconds: float,
        is_update: bool,
    ) -> None:
        """Record a micro-batch that was trained on.

        Args:
            wait_seconds: seconds in which the loop waited for the batch.
            is_update: whether an update ended with this micro-batch.

        Raises:
            UserError: a value is not a number, or the metrics are not a dictionary.
        """
        require_loss_and_metrics(loss, metrics, "run.record(loss, {name: values})")
        self.sums.add(loss, metrics or {})
        self.stopwatch.count(work, wait_seconds, is_update)
        if is_update and self.cause_of_no_mfu is not None:
            warn(
                "perf/mfu is not logged, because the model's FLOPs can't be counted "
                f"({self.cause_of_no_mfu}); they are counted with the function that is passed to "
                "run.start, and a batch as the loader yields it"
            )
            self.cause_of_no_mfu = None
        self.power.sample_if_due()

    def end_interval(self) -> dict[str, float]:
        """End the interval that began at the last log line, and return its metrics over all ranks.

        Their prefixes are ``train/``, ``perf/`` and ``memory/``, and on an NVIDIA GPU also
        ``gpu/``. It must be called on all ranks.
        """
        self.contention.warn_if_contended()
        with self.stopwatch.stopped():
            readings = memory_used(self.device) | self.power.readings()
            self.rising_memory.warn_if_rising(readings[HOST_MEMORY])
            own_sums = self.sums.take()
            row = self.sums.row(own_sums)
            figures, rows = self.gather_figures(self.stopwatch.lap(), readings, row)
            # The first column counts the metrics of a rank that are not in its row yet. If a rank
            # has such metrics, the ranks agree on them, and gather longer rows.
            if rows[:, 0].any():
                self.sums.agree_on_names(self.accelerator, own_sums)
                rows = self.gather_rows(self.sums.row(own_sums))
            if GPU_UTILIZATION in figures:
                self.utilizations.append(figures[GPU_UTILIZATION])
            return {**self.sums.means(rows), **figures, GOODPUT: self.goodput()}

    def whole_run_figures(self) -> dict[str, float]:
        """Return the last update's loss, and the whole run's ``perf/`` and peak ``memory/``.

        It must be called on all ranks.
        """
        readings = memory_used(self.device)
        # The summary shows the peak, and not the memory at the end.
        readings[HOST_MEMORY] = peaks(torch.device("cpu")).in_use / MEBIBYTE
        loss = self.sums.last_update_loss()
        numbers = [loss.value, loss.micro_batches, *self.load.times().values()]
        figures, rows = self.gather_figures(self.stopwatch.steady_interval, readings, numbers)
        losses, micro_batches, cpu_times = rows.split([1, 1, rows.shape[1] - 2], dim=1)
        # The result is NaN if no rank has made an update.
        figures[TRAINING_LOSS] = float((losses * micro_batches).sum() / micro_batches.sum())
        if self.was_on_another_device():
            figures.pop(MFU, None)  # the time on the other device is a share of another peak
        fraction = other_cpu_fraction(cpu_times, min(local_world_size(), len(rows)))
        if fraction is not None:
            figures[OTHER_CPU] = fraction
        return figures

    def was_on_another_device(self) -> bool:
        """Whether the attempt before this one ran on a device with another peak."""
        if not self.peak or not self.peak_before:
            return False
        ratio = self.peak / self.peak_before
        return max(ratio, 1 / ratio) > OTHER_DEVICE_RATIO

    def gather_figures(
        self, interval: Interval, readings: Mapping[str, float], numbers: list[float]
    ) -> tuple[dict[str, float], Tensor]:
        """Gather the measurements of all ranks, in one collective.

        Args:
            interval: this rank's time and work.
            readings: this rank's memory, and its GPU's utilisation and power, by metric.
            numbers: n further numbers of this rank.

        Returns:
            The figures, without those that a rank can't report; and the `numbers` of all ranks,
            float64 [world_size, n]. The figures are the ``perf/`` metrics, and of each of the
            `readings` the maximum over ranks. But ``gpu/utilization`` is the mean, and
            ``gpu/utilization_min`` is added.
        """
        own_interval = [*vars(interval).values()]
        own_readings = [*readings.values()]
        rows = self.gather_rows([*own_interval, *own_readings, *numbers])
        sizes = [len(own_interval), len(own_readings), len(numbers)]
        intervals, readings_of_ranks, numbers_of_ranks = rows.split(sizes, dim=1)
        figures: dict[str, float] = {}
        if interval.updates:  # an interval whose updates were all profiled has no speed
            figures |= throughput(intervals, self.flops, self.peak)
        figures |= dict(zip(readings, readings_of_ranks.amax(0).tolist(), strict=True))
        if GPU_UTILIZATION in readings:
            column = [*readings].index(GPU_UTILIZATION)
            utilization = readings_of_ranks[:, column]
            figures[GPU_UTILIZATION] = float(utilization.mean())
            figures[MIN_GPU_UTILIZATION] = float(utilization.min())
        # NaN stands for a value that the GPU driver of at least one rank does not report.
        known_figures = {name: value for name, value in figures.items() if not math.isnan(value)}
        return known_figures, numbers_of_ranks

    def gather_rows(self, row: list[float]) -> Tensor:
        """Return the rows of all ranks, float64 [world_size, n], on the host."""
        return gather_numbers(self.accelerator, torch.tensor(row, dtype=torch.float64))

    def idle_sentence(self) -> str | None:
        """Return advice for GPUs that were idle for much of the time.

        The result is None for busy GPUs, and if fewer than two intervals were measured.
        """
        later_utilizations = self.utilizations[1:]  # the first interval includes compilation
        if not later_utilizations:
            return None
        share = mean(later_utilizations)
        if share >= BUSY_SHARE:
            return None
        return (
            f"the GPUs computed for {share:.0%} of the time: try a larger --batch-size, --compile, "
            "or more --num-workers; --profile says what holds them up"
        )

    def goodput(self) -> float:
        """Return the share that training steps took of the time since the run began.

        Compilation and warming up do not count as training steps.
        """
        useful = self.stopwatch.useful_seconds
        return useful / max(self.clock.seconds, useful, 1e-9)

    def state_dict(self) -> MetersState:
        return {
            "stopwatch": self.stopwatch.state_dict(),
            "sums": self.sums.state_dict(),
            "clock": self.clock.state_dict(),
            "compile_time": self.compile_time.state_dict(),
            "peak": self.peak,
            "load": self.load.state_dict(),
        }

    def load_state_dict(self, state: MetersState) -> None:
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.sums.load_from_ranks([state["sums"]])
        self.clock.load_state_dict(state["clock"])
        self.compile_time.load_state_dict(state["compile_time"])
        self.peak_before = state["peak"]
        self.load.load_state_dict(state["load"])

    def load_from_ranks(self, states: Sequence[MetersState]) -> None:
        """Restore the sums and the times of a run that had a different number of ranks.

        The work of its updates is not restored. It was done with a different number of ranks, so it
        would distort the speed of this attempt.
        """
        self.stopwatch.load_times(states[0]["stopwatch"])
        # The clocks of all ranks count the time of the same run.
        self.clock.load_state_dict(states[0]["clock"])
        self.compile_time.load_state_dict(states[0]["compile_time"])
        # One rank takes all sums, because a log line adds them up over the ranks.
        if self.accelerator.is_main_process:
            self.sums.load_from_ranks([state["sums"] for state in states])


def cause_in_recipe(error: Exception) -> str:
    """Return an error in one line, and the line of the recipe that raised it, if any did."""
    cause = cause_text(error, first_line=True)
    line = user_line_of(error)
    return cause if line is None else f"{cause}, in {line}"
