"""A run's figures: speed, memory, loss and accuracy, gathered from all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from common.console import say
from common.flops import ComputeLoss, TrainingFlops, training_flops
from common.hardware import PowerMeter, peak_tflops
from common.memory import memory_peaks, memory_used
from common.metrics import TrainingSums
from common.stopwatch import Interval, Stopwatch, Work, synchronize, throughput

if TYPE_CHECKING:
    from common.loader import Samples

INTERVALS = ("first", "steady", "current", "early")


class Meters:
    """Counts on each rank without synchronising; gathers at the log interval and at the end."""

    def __init__(self, accelerator: Accelerator, accumulation: int) -> None:
        self.accelerator = accelerator
        self.sums = TrainingSums(accelerator.device, accumulation)
        self.power = PowerMeter(accelerator.device)
        self.stopwatch = Stopwatch(
            lambda: synchronize(accelerator.device), energy=self.power.joules
        )
        self.began_at = time.time()  # of the first attempt, where a run was resumed
        self.flops: TrainingFlops | None = None
        self.peak = 0.0
        self.peak_source = ""

    def find_flops(
        self, model: nn.Module, compute_loss: ComputeLoss, samples: Samples, dtype: torch.dtype
    ) -> None:
        """Find the model's operations and the device's peak in `dtype`.

        A model that can't run on shapes alone has no MFU, and trains on.
        """
        try:
            self.flops = training_flops(model, compute_loss, samples)
            self.peak, self.peak_source = peak_tflops(self.accelerator.device, dtype)
        except Exception as problem:
            reason = (str(problem).splitlines() or [""])[0]
            say(f"no perf/mfu: FLOPs can't be counted ({type(problem).__name__}: {reason})")

    def count(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        work: Work,
        wait_seconds: float,
        is_update: bool,
    ) -> None:
        """Take note of a micro-batch that was trained on.

        Args:
            loss: its mean.
            logits: [batch, classes].
            labels: int64 [batch].
            work: samples and tokens in it.
            wait_seconds: until the batch was there.
            is_update: whether an optimizer update ended with it.
        """
        self.sums.add(loss, logits, labels)
        self.stopwatch.count(work, wait_seconds, is_update)

    def interval(self) -> dict[str, float]:
        """Return the ``train/``, ``perf/`` and ``memory/`` metrics of all ranks' last interval."""
        running = self.stopwatch.started is not None
        self.stopwatch.stop()
        lap = self.stopwatch.lap()
        peaks = memory_used(self.accelerator.device) | self.power.readings()
        counts = torch.tensor([*vars(lap).values(), *peaks.values()], dtype=torch.float64)
        ranks = self.gather(torch.cat([counts, self.sums.take()]))
        fields = len(vars(lap))
        loss, correct, micro_batches, samples = ranks[:, -4:].sum(0).tolist()
        values = {
            "train/loss": loss / micro_batches,
            "train/accuracy": correct / samples,
            # No speed of an interval whose updates were all profiled.
            **(throughput(ranks[:, :fields], self.flops, self.peak) if lap.updates else {}),
            **dict(zip(peaks, ranks[:, fields:-4].amax(0).tolist(), strict=True)),
            "perf/goodput": self.goodput(),
        }
        if running:
            self.stopwatch.start()
        return values

    def goodput(self) -> float:
        """Return what share of the time since the run first began was useful.

        Lost is everything but training steps: start, compilation, evaluation, checkpoints, and
        the time between a kill and the end of the restart.
        """
        return self.stopwatch.useful_seconds / (time.time() - self.began_at)

    def whole_run(self) -> dict[str, float]:
        """Return the last update's loss, and ``perf/`` and the ``memory/`` peaks of all the run."""
        whole = list(vars(self.stopwatch.whole_run).values())
        peaks = memory_peaks(self.accelerator.device)
        mine = [*whole, *peaks.values(), self.sums.last_loss()]
        ranks = self.gather(torch.tensor(mine, dtype=torch.float64))
        return {
            **throughput(ranks[:, : len(whole)], self.flops, self.peak),
            **dict(zip(peaks, ranks[:, len(whole) : -1].amax(0).tolist(), strict=True)),
            "train/loss": float(ranks[:, -1].mean()),
        }

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the figures of all ranks, float64 [world_size, figures], on the host."""
        return self.accelerator.gather(mine[None].to(self.accelerator.device)).cpu()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs of this rank."""
        intervals = {
            f"stopwatch.{name}": [*vars(getattr(self.stopwatch, name)).values()]
            for name in INTERVALS
        }
        tensors = {
            name: torch.tensor(values, dtype=torch.float64) for name, values in intervals.items()
        }
        return tensors | self.sums.state()

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on with what this rank had counted."""
        self.sums.load_state([tensors])
        for name in INTERVALS:
            setattr(self.stopwatch, name, Interval(*tensors[f"stopwatch.{name}"].tolist()))
