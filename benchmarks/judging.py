"""Judges all contestants' models by the same code on the same held-out samples."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.isolation import default_device
from benchmarks.rounds import Measurement, Round, Training
from benchmarks.textbook import AUTOCAST_TYPES
from common.data.loader import Loader
from common.data.order import EvaluationOrder


class Judge:
    """Evaluates a model on the first samples of a split, in one precision for all."""

    def __init__(self, recipe: ModuleType, split: Any, precision: str, limit: int) -> None:
        count = min(limit, len(split))
        lengths = getattr(split, "lengths", None)
        order = EvaluationOrder(
            num_samples=count,
            batch_size=128,
            world_size=1,
            rank=0,
            lengths=None if lengths is None else lengths[:count],
        )
        self.recipe = recipe
        self.loader = Loader(split, order, default_device(), "device")
        self.dtype = AUTOCAST_TYPES.get(precision)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return the mean loss and the accuracy."""
        device = default_device()
        loss_sum, right, count = 0.0, 0, 0
        model.to(device).eval()
        with (
            torch.inference_mode(),
            torch.autocast(device.type, self.dtype, enabled=self.dtype is not None),
        ):
            for batch in self.loader:
                _, logits = self.recipe.compute_loss(model, batch)
                labels = batch["labels"]
                loss_sum += F.cross_entropy(logits.float(), labels, reduction="sum").item()
                right += int((logits.argmax(-1) == labels).sum())
                count += len(labels)
        return loss_sum / count, right / count


def throughput(training: Training, judge: Judge | None, asked: Round) -> Measurement:
    """Return the samples/s of a training, and how good its model is where that is asked for."""
    measurement = Measurement(training.samples / training.seconds, training.train_loss)
    if judge is None or training.model is None or not asked.judged:
        return measurement
    loss, accuracy = judge.evaluate(training.model)
    return dataclasses.replace(measurement, evaluation_loss=loss, accuracy=accuracy)
