"""Ready-made figures for single-label classification: accuracy, F1, confusion, each class."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from common.measure.sums import Evaluation, Sums


class Classified(Evaluation):
    """The figures of a classification, with what they were counted from."""

    confusion: torch.Tensor  # counts of all ranks [classes, classes]: true class, then predicted
    class_names: Sequence[str]
    predicted: torch.Tensor  # int64 [samples], of this rank's first batches in their order
    labels: torch.Tensor
    probabilities: torch.Tensor  # float32 [samples], of the predicted classes

    def by_class(self) -> list[tuple[str, float, float, float, int]]:
        """Return of each class: name, precision, recall, F1 and the number of its samples."""
        rows = zip(self.class_names, *rates(self.confusion), self.confusion.sum(1), strict=True)
        return [(name, float(p), float(r), float(f), int(n)) for name, p, r, f, n in rows]


class ClassificationSums(Sums):
    """Loss and confusion counts of an evaluation, each sample once, over all ranks."""

    BATCHES_KEPT = 64  # in which mistakes are looked for: enough for examples, bounded

    def __init__(self, accelerator: Accelerator, class_names: Sequence[str]) -> None:
        super().__init__(accelerator)
        self.class_names = class_names
        self.seen: list[torch.Tensor] = []
        self.probabilities: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
        """Add a batch: its mean loss, logits [batch, classes], labels int64 [batch]."""
        predicted, size = logits.argmax(-1), len(self.class_names)
        counts = torch.zeros(size**2, device=labels.device, dtype=torch.float64)
        ones = torch.ones_like(labels, dtype=torch.float64)
        counts.scatter_add_(0, labels * size + predicted, ones)  # bincount would wait for a GPU
        super().add(len(labels), loss=loss * len(labels), confusion=counts)
        if len(self.seen) < self.BATCHES_KEPT:
            self.seen.append(torch.stack([predicted, labels]))
            self.probabilities.append(logits.float().softmax(-1).amax(-1))

    def result(self) -> Classified:
        """Return ``loss``, ``accuracy``, ``count``, and ``f1``; of more than two ``macro_f1``."""
        totals, classes = self.reduced(), len(self.class_names)
        # Where no rank had a sample, there is nothing but their number.
        counts = totals.get("confusion", torch.zeros(classes**2)).view(classes, classes)
        f1, count = rates(counts)[2], int(totals["count"])
        found = Classified(
            loss=float(totals.get("loss", torch.nan)) / max(count, 1),
            accuracy=float(counts.trace()) / max(count, 1),
            **({"f1": float(f1[1])} if classes == 2 else {"macro_f1": float(f1.mean())}),
            count=count,
        )
        found.confusion, found.class_names = counts, self.class_names
        none = torch.empty((2, 0), dtype=torch.long)
        found.predicted, found.labels = torch.cat(self.seen or [none], dim=1).cpu()
        found.probabilities = torch.cat(self.probabilities or [torch.empty(0)]).cpu()
        return found


def rates(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return precision, recall and F1 [classes] of a confusion matrix; 0 where undefined."""
    hits, predicted, true = counts.diagonal(), counts.sum(0), counts.sum(1)
    parts = ((hits, predicted), (hits, true), (2 * hits, predicted + true))
    precision, recall, f1 = (part / whole.clamp(min=1) for part, whole in parts)
    return precision, recall, f1
