"""Figures to trust: counted over all ranks, timed between synchronised points."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

# Compilation, autotuning and allocation fall into the first updates: throughput starts after.
FIRST_UPDATES = 3
MEBIBYTE = 2**20


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


def throughput(intervals: torch.Tensor, tokens_matter: bool) -> dict[str, float]:
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
    if tokens_matter:
        metrics["perf/tokens_per_second"] = float(intervals[:, 4].sum()) / seconds
    return metrics


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB; those of a GPU are peaks."""
    metrics = {"memory/host_rss_mib": psutil.Process().memory_info().rss / MEBIBYTE}
    if device.type == "cuda":
        metrics["memory/peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / MEBIBYTE
        metrics["memory/peak_reserved_mib"] = torch.cuda.max_memory_reserved(device) / MEBIBYTE
    return metrics


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`, so that a clock read next tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class TrainingSums:
    """Sums of loss and right answers since the last log line, kept on the device."""

    FOLD_EVERY = 32  # micro-batches held before they are summed in one go: few, large operations

    def __init__(self, device: torch.device, accumulation: int) -> None:
        self.device = device
        self.last_update: deque[torch.Tensor] = deque(maxlen=accumulation)
        self.held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.reset()

    def reset(self) -> None:
        """Start from zero."""
        self.loss = torch.zeros((), device=self.device, dtype=torch.float64)
        self.correct = torch.zeros((), device=self.device, dtype=torch.int64)
        self.micro_batches = 0
        self.samples = 0

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Take note of one micro-batch; costs no synchronisation."""
        loss = loss.detach()
        self.last_update.append(loss)
        self.held.append((loss, logits.detach(), labels))
        if len(self.held) >= self.FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        """Sum what is held."""
        if not self.held:
            return
        losses, logits, labels = zip(*self.held, strict=True)
        self.held.clear()
        all_labels = torch.cat(labels)
        self.loss += torch.stack(losses).sum(dtype=torch.float64)
        self.correct += (torch.cat(logits).argmax(-1) == all_labels).sum()
        self.micro_batches += len(losses)
        self.samples += len(all_labels)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs to go on with these sums."""
        self.fold()
        counts = [float(self.loss), float(self.correct), self.micro_batches, self.samples]
        losses = torch.stack([*self.last_update]) if self.last_update else torch.empty(0)
        return {
            "sums.counts": torch.tensor(counts, dtype=torch.float64),
            "sums.last_update": losses,
        }

    def load_state(self, states: list[dict[str, torch.Tensor]]) -> None:
        """Go on with the sums of one rank, or of several if there are fewer ranks now."""
        loss, correct, micro, samples = sum(s["sums.counts"] for s in states).tolist()  # type: ignore[union-attr]
        self.loss += loss
        self.correct += int(correct)
        self.micro_batches, self.samples = int(micro), int(samples)
        losses = torch.cat([state["sums.last_update"] for state in states])
        self.last_update.extend(losses.to(self.device))

    def last_loss(self) -> float:
        """Return this rank's mean loss of the last update; NaN where there was none."""
        return float(torch.stack([*self.last_update]).mean()) if self.last_update else float("nan")

    def take(self) -> torch.Tensor:
        """Return float64 [4]: sums of loss, right answers, micro-batches, samples; then reset."""
        self.fold()
        counts = torch.tensor([self.micro_batches, self.samples], dtype=torch.float64)
        taken = torch.cat([torch.stack([self.loss, self.correct.double()]).cpu(), counts])
        self.reset()
        return taken


def gather_interval(
    accelerator: Accelerator, lap: Interval, sums: TrainingSums
) -> dict[str, float]:
    """Return the ``train/``, ``perf/`` and ``memory/`` metrics of all ranks' last interval."""
    memory = memory_used(accelerator.device)
    counts = torch.tensor([*vars(lap).values(), *memory.values()], dtype=torch.float64)
    mine = torch.cat([counts, sums.take()]).to(accelerator.device)
    ranks = accelerator.gather(mine[None]).cpu()
    fields = len(vars(lap))
    loss, correct, micro_batches, samples = ranks[:, -4:].sum(0).tolist()
    return {
        "train/loss": loss / micro_batches,
        "train/accuracy": correct / samples,
        **throughput(ranks[:, :fields], tokens_matter=bool(lap.tokens)),
        **dict(zip(memory, ranks[:, fields:-4].amax(0).tolist(), strict=True)),
    }


class EvaluationSums:
    """Loss and confusion counts of an evaluation, each sample once, over all ranks."""

    def __init__(self, accelerator: Accelerator, num_classes: int) -> None:
        self.accelerator = accelerator
        self.num_classes = num_classes
        self.loss = torch.zeros((), device=accelerator.device)
        # Counts by true class, then predicted class.
        self.confusion = torch.zeros(num_classes**2, device=accelerator.device)

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: its mean loss, logits [batch, classes], labels [batch]."""
        cells = labels * self.num_classes + logits.argmax(-1)
        self.confusion.scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.float32))
        self.loss += loss.detach() * len(labels)

    def result(self) -> dict[str, float]:
        """Return ``eval/loss``, ``eval/accuracy``, ``eval/count``; for two classes ``eval/f1``."""
        sums = torch.cat([self.loss[None], self.confusion])
        sums = self.accelerator.reduce(sums, "sum").double().cpu()
        confusion = sums[1:].view(self.num_classes, self.num_classes)
        count = float(confusion.sum())
        metrics = {
            "eval/loss": float(sums[0]) / count,
            "eval/accuracy": float(confusion.diagonal().sum()) / count,
            "eval/count": int(count),
        }
        if self.num_classes == 2:
            errors = float(confusion[0, 1] + confusion[1, 0])
            hits = float(confusion[1, 1])
            metrics["eval/f1"] = 2 * hits / (2 * hits + errors) if hits else 0.0
        return metrics
