"""Ready-made figures for single-label classification: accuracy, F1, confusion, each class."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.measure.sums import Evaluation, Metrics, Sums


class Classified(Evaluation):
    """The figures of a classification, with what they were counted from."""

    confusion: torch.Tensor  # counts of all ranks [classes, classes]: true class, then predicted
    class_names: Sequence[str]
    predicted: torch.Tensor  # int64 [samples], of this rank's first batches in their order
    labels: torch.Tensor

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

    def add(  # type: ignore[override]
        self,
        loss: torch.Tensor | float,
        logits: torch.Tensor,
        labels: torch.Tensor,
        metrics: Metrics | None = None,
    ) -> None:
        """Add a batch: its mean loss, logits [batch, classes], labels int64 [batch].

        Further metrics are as `run.record` takes them: of each, the mean over all elements.
        """
        predicted, size = logits.argmax(-1), len(self.class_names)
        counts = torch.zeros(size**2, device=labels.device, dtype=torch.float64)
        ones = torch.ones_like(labels, dtype=torch.float64)
        counts.scatter_add_(0, labels * size + predicted, ones)  # bincount would wait for a GPU
        super().add(len(labels), confusion=counts)
        super().record(loss, metrics, len(labels))
        if len(self.seen) < self.BATCHES_KEPT:
            self.seen.append(torch.stack([predicted, labels]))

    def record(self, loss: Any, metrics: Metrics | None, count: Any) -> None:
        """Refuse: without logits and labels there is nothing to classify by."""
        advice = "call sums.add(loss, logits, labels, metrics), or use Sums"
        raise UserError(f"ClassificationSums.record: it needs the labels, too: {advice}")

    def result(self) -> Classified:
        """Return ``loss``, ``accuracy``, ``count``, and ``f1``; of more than two ``macro_f1``."""
        reduced, classes = self.reduce(), len(self.class_names)
        # Where no rank had a sample, there is nothing but their number.
        counts = reduced.totals.get("confusion", torch.zeros(classes**2)).view(classes, classes)
        f1, count = rates(counts)[2], int(reduced.totals["count"])
        figures = {
            "loss": torch.nan,
            "accuracy": float(counts.trace()) / max(count, 1),
            **({"f1": float(f1[1])} if classes == 2 else {"macro_f1": float(f1.mean())}),
        }
        classified = Classified(figures | reduced.means | {"count": count})
        classified.confusion, classified.class_names = counts, self.class_names
        none = torch.empty((2, 0), dtype=torch.long)
        classified.predicted, classified.labels = torch.cat(self.seen or [none], dim=1).cpu()
        return classified


def rates(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return precision, recall and F1 [classes] of a confusion matrix; 0 where undefined."""
    hits, predicted, true = counts.diagonal(), counts.sum(0), counts.sum(1)
    parts = ((hits, predicted), (hits, true), (2 * hits, predicted + true))
    precision, recall, f1 = (part / whole.clamp(min=1) for part, whole in parts)
    return precision, recall, f1
