"""A run's figures: speed, memory, loss and accuracy, gathered from all ranks."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from common.memory import memory_used
from common.metrics import TrainingSums
from common.stopwatch import Interval, Stopwatch, synchronize, throughput

INTERVALS = ("first", "steady", "current", "early")


class Meters:
    """Counts on each rank without synchronising; gathers at the log interval and at the end."""

    def __init__(self, accelerator: Accelerator, accumulation: int) -> None:
        self.accelerator = accelerator
        self.sums = TrainingSums(accelerator.device, accumulation)
        self.stopwatch = Stopwatch(lambda: synchronize(accelerator.device))

    def count(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        samples: int,
        tokens: int,
        wait_seconds: float,
        is_update: bool,
    ) -> None:
        """Take note of a micro-batch that was trained on.

        Args:
            loss: its mean.
            logits: [batch, classes].
            labels: int64 [batch].
            tokens: real ones, without padding.
            wait_seconds: until the batch was there.
            is_update: whether an optimizer update ended with it.
        """
        self.sums.add(loss, logits, labels)
        self.stopwatch.count(samples, tokens, wait_seconds, is_update)

    def interval(self) -> dict[str, float]:
        """Return the ``train/``, ``perf/`` and ``memory/`` metrics of all ranks' last interval."""
        lap, memory = self.stopwatch.lap(), memory_used(self.accelerator.device)
        counts = torch.tensor([*vars(lap).values(), *memory.values()], dtype=torch.float64)
        mine = torch.cat([counts, self.sums.take()]).to(self.accelerator.device)
        ranks = self.accelerator.gather(mine[None]).cpu()
        fields = len(vars(lap))
        loss, correct, micro_batches, samples = ranks[:, -4:].sum(0).tolist()
        return {
            "train/loss": loss / micro_batches,
            "train/accuracy": correct / samples,
            **throughput(ranks[:, :fields]),
            **dict(zip(memory, ranks[:, fields:-4].amax(0).tolist(), strict=True)),
            "time/train_seconds": self.stopwatch.train_seconds,
        }

    def whole_run(self) -> dict[str, float]:
        """Return the loss of the last update and the ``perf/`` metrics of all updates."""
        whole = list(vars(self.stopwatch.whole_run).values())
        mine = torch.tensor([[*whole, self.sums.last_loss()]], dtype=torch.float64)
        ranks = self.accelerator.gather(mine.to(self.accelerator.device)).cpu()
        return {
            **throughput(ranks[:, :-1]),
            "train/loss": float(ranks[:, -1].mean()),
        }

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
            seconds, wait, *counts = tensors[f"stopwatch.{name}"].tolist()
            setattr(self.stopwatch, name, Interval(seconds, wait, *map(int, counts)))
