"""Sums of loss and right answers, kept on the device, over all ranks and each sample once."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        logits = logits.detach()
        # Of a compiled model they may lie where a CUDA graph puts those of the next batch.
        self.held.append((loss, logits.clone() if logits.is_cuda else logits, labels))
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


class Evaluation(dict[str, float]):
    """The metrics of an evaluation, with what they were counted from.

    ``confusion`` has counts of all ranks [classes, classes] by true, then predicted class;
    ``predicted`` and ``labels`` [samples] are of this rank's first batches, in their order.
    """

    confusion: torch.Tensor
    predicted: torch.Tensor
    labels: torch.Tensor


class EvaluationSums:
    """Loss and confusion counts of an evaluation, each sample once, over all ranks."""

    BATCHES_KEPT = 64  # in which mistakes are looked for: enough for examples, bounded

    def __init__(self, accelerator: Accelerator, num_classes: int) -> None:
        self.accelerator = accelerator
        self.num_classes = num_classes
        self.loss = torch.zeros((), device=accelerator.device)
        # Counts by true class, then predicted class.
        self.confusion = torch.zeros(num_classes**2, device=accelerator.device)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: its mean loss, logits [batch, classes], labels [batch]."""
        predicted = logits.argmax(-1)
        cells = labels * self.num_classes + predicted
        self.confusion.scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.float32))
        self.loss += loss.detach() * len(labels)
        if len(self.seen) < self.BATCHES_KEPT:
            self.seen.append((predicted, labels))

    def result(self) -> Evaluation:
        """Return ``eval/loss``, ``eval/accuracy``, ``eval/count``; for two classes ``eval/f1``."""
        sums = torch.cat([self.loss[None], self.confusion])
        sums = self.accelerator.reduce(sums, "sum").double().cpu()
        confusion = sums[1:].view(self.num_classes, self.num_classes)
        count = float(confusion.sum())
        metrics = Evaluation(
            {
                "eval/loss": float(sums[0]) / count,
                "eval/accuracy": float(confusion.diagonal().sum()) / count,
                "eval/count": int(count),
            }
        )
        metrics.confusion = confusion
        none = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        columns = zip(*(self.seen or [none]), strict=True)
        metrics.predicted, metrics.labels = (torch.cat(column).cpu() for column in columns)
        if self.num_classes == 2:
            errors = float(confusion[0, 1] + confusion[1, 0])
            hits = float(confusion[1, 1])
            metrics["eval/f1"] = 2 * hits / (2 * hits + errors) if hits else 0.0
        return metrics
