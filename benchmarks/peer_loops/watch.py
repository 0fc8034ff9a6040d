"""What a peer's loop reports about its progress, and how its predictions are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch


class Watch(Protocol):
    """Takes notes of a training, and decides when it ends."""

    def begin(self, updates_per_epoch: int) -> None:
        """Note that the first batch is requested now."""

    def update(self, samples: int, tokens: int = 0, squared_tokens: int = 0) -> bool:
        """Note an update; return whether to go on.

        Args:
            samples: of the batch.
            tokens: of the batch, with padding.
            squared_tokens: the sum over samples of the square of their tokens, with padding.
        """
        ...

    def evaluation_begins(self) -> None:
        """Note that an evaluation begins now."""

    def evaluation_ended(self, figures: Mapping[str, float]) -> bool:
        """Note the figures of an evaluation that has just ended; return whether to go on."""
        ...


class Predictions:
    """The predicted classes and the labels of an evaluation."""

    def __init__(self) -> None:
        self.predicted: list[np.ndarray] = []  # int64 [batch] each
        self.labels: list[np.ndarray] = []

    def add(self, predicted: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: predicted classes and labels, int64 [batch] each."""
        self.predicted.append(predicted.cpu().numpy())
        self.labels.append(labels.cpu().numpy())

    def figures(self) -> dict[str, float]:
        """Return the figures over all batches."""
        return classification_figures(np.concatenate(self.predicted), np.concatenate(self.labels))


def classification_figures(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracy and, of two classes, the F1 of the second, as GLUE defines both.

    Args:
        predicted: int64 [samples].
        labels: int64 [samples].
    """
    figures = {"accuracy": float((predicted == labels).mean())}
    if labels.max(initial=0) <= 1:
        hits = int(((predicted == 1) & (labels == 1)).sum())
        predicted_and_labelled = int((predicted == 1).sum() + (labels == 1).sum())
        figures["f1"] = 2 * hits / max(1, predicted_and_labelled)
    return figures
