"""Ready-made figures for single-label classification: accuracy, F1, and rates of each class."""

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.measure.first_batches import FirstBatches
from common.measure.sums import Evaluation, Sums
from common.measure.value_checks import Measured, Metrics
from common.system.devices import has_float64

ADVICE_ON_BATCHES = (
    "pass logits [n, classes] and integer labels [n] from 0 to classes - 1, and leave out ignored "
    "ones first, as with logits[kept], labels[kept]"
)


class Classified(Evaluation):
    """The figures of a classification, with the counts and predictions behind them."""

    def __init__(
        self,
        figures: Mapping[str, float],
        *,
        class_names: Sequence[str],
        confusion: torch.Tensor | None,
        class_counts: torch.Tensor,
        predicted: torch.Tensor,
        labels: torch.Tensor,
        probabilities: torch.Tensor,
        first_batches: FirstBatches | None = None,
    ) -> None:
        """Keep the figures by name, and what they were computed from.

        Args:
            figures: as `ClassificationSums.result` lists them.
            class_names: the name of each class.
            confusion: counts of all ranks, [classes, classes]: true class, then predicted class.
                None if there are too many classes for a matrix.
            class_counts: counts of all ranks, [3, classes]: samples classified correctly,
                predicted, and labelled.
            predicted: the classes of this rank's first batches, in their order, int64 [samples].
            labels: the labels of the same samples, int64 [samples].
            probabilities: the probabilities of the predicted classes, float32 [samples].
            first_batches: see `Evaluation`.
        """
        super().__init__(figures, first_batches)
        self.class_names = class_names
        self.confusion = confusion
        self.class_counts = class_counts
        self.predicted = predicted
        self.labels = labels
        self.probabilities = probabilities

    def by_class(self) -> list[tuple[str, float, float, float, int]]:
        """Return for each class its name, precision, recall, F1 and number of samples."""
        rows = zip(self.class_names, *rates(self.class_counts), self.class_counts[2], strict=True)
        return [
            (name, float(precision), float(recall), float(f1), int(count))
            for name, precision, recall, f1, count in rows
        ]


class ClassificationSums(Sums):
    """Sums the loss and the confusion matrix of an evaluation, over all ranks."""

    MAX_CLASSES = 500  # the memory of a confusion matrix grows with the square of the classes
    BATCHES_KEPT = 64  # for examples of mistakes

    def __init__(self, accelerator: Accelerator, class_names: Sequence[str] | None) -> None:
        """Prepare empty sums.

        Args:
            class_names: the name of each class, such as ``run.data.class_names``.

        Raises:
            UserError: there are no names, because the data have none.
        """
        super().__init__(accelerator)
        if class_names is None:
            raise UserError(
                "ClassificationSums got None instead of the names of the classes",
                advice=(
                    "name them in the data, as in Data(NAME, splits, class_names=['cat', 'dog'])"
                ),
                every_rank=True,
            )
        self.class_names = class_names
        # The smallest and the largest label so far, on their device. `result` reads them, so that
        # no batch waits for a GPU. None: there was no label yet.
        self.label_range: tuple[torch.Tensor, torch.Tensor] | None = None
        # The first batches: predicted classes and labels, int64 [2, samples], and the probabilities
        # of the predicted classes, float32 [samples].
        self.predictions_and_labels: list[torch.Tensor] = []
        self.probabilities: list[torch.Tensor] = []

    def add(  # type: ignore[override]
        self,
        loss: torch.Tensor | float,
        logits: torch.Tensor,
        labels: torch.Tensor,
        metrics: Metrics | None = None,
    ) -> None:
        """Add a batch.

        Args:
            loss: the mean loss of the batch.
            logits: [batch, classes].
            labels: integers [batch], from 0 to classes - 1; `result` checks the range.
            metrics: further metrics, as `run.record` takes them. The mean over all elements of each
                becomes a figure.

        Raises:
            UserError: the logits or the labels have another shape or type.
        """
        require_batch(logits, labels, len(self.class_names))
        labels = labels.long()
        self.note_range(labels)
        # An index out of range would end a GPU's process before `result` could say so.
        labels = labels.clamp(0, len(self.class_names) - 1)
        predicted = logits.argmax(-1)
        super().add(len(labels), classified=self.count_classes(predicted, labels))
        super().record(loss, metrics, len(labels))
        if len(self.predictions_and_labels) < self.BATCHES_KEPT:
            self.predictions_and_labels.append(torch.stack([predicted, labels]))
            self.probabilities.append(logits.float().softmax(-1).amax(-1))

    def note_range(self, labels: torch.Tensor) -> None:
        """Keep the smallest and the largest label so far, without waiting for the device."""
        if not len(labels):
            return
        smallest, largest = torch.aminmax(labels)
        if self.label_range is not None:
            smallest = torch.minimum(smallest, self.label_range[0])
            largest = torch.maximum(largest, self.label_range[1])
        self.label_range = (smallest, largest)

    def require_labels_in_range(self) -> None:
        """Raise a `UserError` if a label of this rank is not the index of a class."""
        if self.label_range is None:
            return
        smallest, largest = map(int, torch.stack(self.label_range).tolist())
        classes = len(self.class_names)
        if smallest < 0 or largest >= classes:
            raise UserError(
                f"ClassificationSums.add got labels from {smallest} to {largest} for {classes} "
                "classes",
                advice=ADVICE_ON_BATCHES,
                every_rank=True,
            )

    def record(self, loss: Measured, metrics: Metrics | None, count: Measured) -> None:
        """Raise a `UserError`: only `add` gets the logits and labels that are needed here."""
        advice = "call sums.add(loss, logits, labels, metrics) instead, or use Sums"
        raise UserError(
            "ClassificationSums.record can't be used, because it gets no labels", advice=advice
        )

    @property
    def has_matrix(self) -> bool:
        """Whether the classes are few enough for a confusion matrix."""
        return len(self.class_names) <= self.MAX_CLASSES

    def count_classes(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Count the samples of a batch by class, for `Classified.confusion` or `class_counts`.

        Counts are float64, or fp32 where the device has no float64. A count of one batch is exact
        in both. `bincount` would do the same, but the host would wait for the GPU.

        Returns:
            With a matrix, [classes²]: the rows of the confusion matrix, one after another. Without
            one, [3 × classes]: the three rows of `Classified.class_counts`, one after another. The
            rows have, for each class, the correct predictions, all predictions, and the labels.
        """
        classes = len(self.class_names)
        device = labels.device
        dtype = torch.float64 if has_float64(device) else torch.float32
        ones = torch.ones_like(labels, dtype=dtype)
        if self.has_matrix:
            counts = torch.zeros(classes**2, device=device, dtype=dtype)
            return counts.scatter_add_(0, labels * classes + predicted, ones)
        counts = torch.zeros(3 * classes, device=device, dtype=dtype)
        counts.scatter_add_(0, labels, (predicted == labels).to(dtype))
        counts.scatter_add_(0, classes + predicted, ones)
        return counts.scatter_add_(0, 2 * classes + labels, ones)

    def result(self) -> Classified:
        """Return the figures over all ranks; called on all ranks.

        They are ``loss``, ``accuracy``, ``count`` and the further metrics given to `add`. With two
        classes, they include ``f1`` of the second class; with any other number, ``macro_f1``: the
        mean over the classes that samples have or were predicted to have, as in scikit-learn.

        Raises:
            UserError: a label was not the index of a class.
        """
        self.require_labels_in_range()
        reduced = self.over_all_ranks()
        classes = len(self.class_names)
        confusion = None
        # `no_counts` is for an evaluation in which no rank had a sample.
        if self.has_matrix:
            no_counts = torch.zeros(classes**2, dtype=torch.float64)
            confusion = reduced.totals.get("classified", no_counts).view(classes, classes)
            class_counts = torch.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)])
        else:
            no_counts = torch.zeros(3 * classes, dtype=torch.float64)
            class_counts = reduced.totals.get("classified", no_counts).view(3, classes)
        f1 = rates(class_counts)[2]
        count = int(reduced.totals["count"])
        figures = {
            "loss": torch.nan,  # for no sample on any rank; otherwise `means` below has the loss
            "accuracy": float(class_counts[0].sum()) / max(count, 1),
        }
        if classes == 2:
            figures["f1"] = float(f1[1])
        else:
            occurs = class_counts[1:].sum(0) > 0
            figures["macro_f1"] = float(f1[occurs].mean()) if occurs.any() else 0.0
        no_batch = torch.empty((2, 0), dtype=torch.long)
        predicted, labels = torch.cat(self.predictions_and_labels or [no_batch], dim=1).cpu()
        return Classified(
            figures | reduced.means | {"count": count},
            class_names=self.class_names,
            confusion=confusion,
            class_counts=class_counts,
            predicted=predicted,
            labels=labels,
            probabilities=torch.cat(self.probabilities or [torch.empty(0)]).cpu(),
            first_batches=self.first_batches,
        )


def require_batch(logits: torch.Tensor, labels: torch.Tensor, classes: int) -> None:
    """Raise a `UserError` unless a batch is logits [n, classes] with n integer labels."""
    fits = logits.ndim == 2 and logits.shape[1] == classes
    is_integer = not (labels.is_floating_point() or labels.is_complex())
    if fits and labels.shape == logits.shape[:1] and is_integer:
        return
    raise UserError(
        f"ClassificationSums.add got logits {[*logits.shape]} and labels {[*labels.shape]} of type "
        f"{str(labels.dtype).removeprefix('torch.')} for {classes} classes",
        advice=ADVICE_ON_BATCHES,
        every_rank=True,
    )


def rates(class_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return precision, recall and F1, [classes] each; 0 where undefined.

    `class_counts` is [3, classes]: samples classified correctly, predicted, and labelled.
    """
    hits, predicted, labelled = class_counts
    precision = hits / predicted.clamp(min=1)
    recall = hits / labelled.clamp(min=1)
    f1 = 2 * hits / (predicted + labelled).clamp(min=1)
    return precision, recall, f1
