"""The task that all contestants train: an MLP on scikit-learn's digits.

The number of samples is a multiple of the batch, so an epoch uses each sample exactly once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.resume.schedule import BATCH, TRAIN_SAMPLES

VALIDATION_SAMPLES = 5 * BATCH
PIXELS = 64
CLASSES = 10
HIDDEN = 512
DROPOUT = 0.1
LEARNING_RATE = 1e-3
DATA_FILE = "digits.npz"


class Digits(Dataset[dict[str, Any]]):
    """Some of the digits: pixels (float32 [64], from 0 to 1), the class, and the sample's index."""

    def __init__(self, folder: Path, split: str) -> None:
        """Read a split, "train" or "validation", of the file that `write_digits` made."""
        with np.load(folder / DATA_FILE) as arrays:
            self.pixels = arrays[f"{split}_pixels"]
            self.labels = arrays[f"{split}_labels"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {
            "pixels": torch.from_numpy(self.pixels[sample]),
            "labels": int(self.labels[sample]),
            "index": int(sample),
        }


def write_digits(folder: Path) -> None:
    """Write both splits into a file, which the trainings read without scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    scaled = (pixels / 16).astype(np.float32)
    end = TRAIN_SAMPLES + VALIDATION_SAMPLES
    np.savez(
        folder / DATA_FILE,
        train_pixels=scaled[:TRAIN_SAMPLES],
        train_labels=labels[:TRAIN_SAMPLES],
        validation_pixels=scaled[TRAIN_SAMPLES:end],
        validation_labels=labels[TRAIN_SAMPLES:end],
    )


class Classifier(nn.Module):
    """An MLP with dropout: pixels float32 [batch, 64] to logits float32 [batch, 10].

    Attributes:
        last_index: the samples (int64 [batch]) of the last training batch, for loops that do not
            show their batch when an update is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(PIXELS, HIDDEN),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(HIDDEN, CLASSES),
        )
        self.last_index: torch.Tensor | None = None

    def forward(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the logits and, with labels (int64 [batch]), the mean loss."""
        if self.training:
            self.last_index = index
        logits = self.layers(pixels)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
