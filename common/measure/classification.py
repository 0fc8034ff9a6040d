"""Ready-made figures for single-label classification: accuracy, F1, confusion, each class."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from common.measure.sums import Evaluation, Sums


class Classified(Evaluation):
    """The figures of a classification, with what they were counted from."""

    # Counts of all ranks [classes, classes], true class, then predicted; None of many classes.
    confusion: torch.Tensor | None
    class_counts: (
        torch.Tensor
    )  # [3, classes]: samples that were hit, predicted and truly of a class
    class_names: Sequence[str]
    predicted: torch.Tensor  # int64 [samples], of this rank's first batches in their order
    labels: torch.Tensor

    def by_class(self) -> list[tuple[str, float, float, float, int]]:
        """Return of each class: name, precision, recall, F1 and the number of its samples."""
        rows = zip(self.class_names, *rates(self.class_counts), self.class_counts[2], strict=True)
        return [(name, float(p), float(r), float(f), int(n)) for name, p, r, f, n in rows]


class ClassificationSums(Sums):
    """Loss and confusion counts of an evaluation, each sample once, over all ranks."""

    # Classes of which a confusion matrix is made: its memory grows with their square.
    MOST_CLASSES = 500
    BATCHES_KEPT = 64  # in which mistakes are looked for: enough for examples, bounded

    def __init__(self, accelerator: Accelerator, class_names: Sequence[str]) -> None:
        super().__init__(accelerator)
        self.class_names = class_names
        self.seen: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
        """Add a batch: its mean loss, logits [batch, classes], labels int64 [batch]."""
        predicted = logits.argmax(-1)
        counts = self.counted(predicted, labels)
        super().add(len(labels), loss=loss * len(labels), classified=counts)
        if len(self.seen) < self.BATCHES_KEPT:
            self.seen.append(torch.stack([predicted, labels]))

    @property
    def has_matrix(self) -> bool:
        return len(self.class_names) <= self.MOST_CLASSES

    def counted(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Count a batch: float64 [classes²], or [3 × classes] where there is no matrix.

        Without waiting for a GPU, as bincount would.
        """
        size = len(self.class_names)
        ones = torch.ones_like(labels, dtype=torch.float64)
        if self.has_matrix:
            counts = torch.zeros(size**2, device=labels.device, dtype=torch.float64)
            return counts.scatter_add_(0, labels * size + predicted, ones)
        counts = torch.zeros(3 * size, device=labels.device, dtype=torch.float64)
        counts.scatter_add_(0, labels, (predicted == labels).double())
        counts.scatter_add_(0, size + predicted, ones)
        return counts.scatter_add_(0, 2 * size + labels, ones)

    def result(self) -> Classified:
        """Return ``loss``, ``accuracy``, ``count``, and ``f1``; of more than two ``macro_f1``."""
        totals = self.reduced()
        classes = len(self.class_names)
        confusion = None
        if self.has_matrix:
            # Where no rank had a sample, there is nothing but their number.
            none = torch.zeros(classes**2, dtype=torch.float64)
            confusion = totals.get("classified", none).view(classes, classes)
            class_counts = torch.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)])
        else:
            none = torch.zeros(3 * classes, dtype=torch.float64)
            class_counts = totals.get("classified", none).view(3, classes)
        f1 = rates(class_counts)[2]
        count = int(totals["count"])
        result = Classified(
            loss=float(totals.get("loss", torch.nan)) / max(count, 1),
            accuracy=float(class_counts[0].sum()) / max(count, 1),
            **({"f1": float(f1[1])} if classes == 2 else {"macro_f1": float(f1.mean())}),
            count=count,
        )
        result.confusion = confusion
        result.class_counts = class_counts
        result.class_names = self.class_names
        no_batch = torch.empty((2, 0), dtype=torch.long)
        result.predicted, result.labels = torch.cat(self.seen or [no_batch], dim=1).cpu()
        return result


def rates(class_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return precision, recall and F1, [classes] each; 0 where undefined.

    `class_counts`: [3, classes], the samples that were hit, predicted and truly of each class.
    """
    hits, predicted, true = class_counts
    parts = ((hits, predicted), (hits, true), (2 * hits, predicted + true))
    precision, recall, f1 = (part / whole.clamp(min=1) for part, whole in parts)
    return precision, recall, f1
