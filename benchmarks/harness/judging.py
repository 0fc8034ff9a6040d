"""Evaluates all contestants' models by the same code on the same held-out samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.isolation import default_device
from benchmarks.harness.precisions import AUTOCAST_TYPES
from benchmarks.harness.rounds import FinishedTraining, Measurement, Round
from common.data.loader import Loader
from common.data.order import EvaluationOrder
from common.data.samples import Samples


class Judge:
    """Evaluates models on the first samples of a split, all in the same precision."""

    def __init__(self, recipe: ModuleType, split: Samples, precision: str, limit: int) -> None:
        """Prepare the loader.

        Args:
            recipe: its `compute_loss` is used.
            precision: "fp32", "bf16" or "fp16".
            limit: largest number of samples.
        """
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
        loss_sum = 0.0
        correct = 0
        count = 0
        model.to(device).eval()
        with (
            torch.inference_mode(),
            torch.autocast(device.type, self.dtype, enabled=self.dtype is not None),
        ):
            for batch in self.loader:
                _, logits = self.recipe.compute_loss(model, batch)
                labels = batch["labels"]
                loss_sum += F.cross_entropy(logits.float(), labels, reduction="sum").item()
                correct += int((logits.argmax(-1) == labels).sum())
                count += len(labels)
        return loss_sum / count, correct / count


def throughput(training: FinishedTraining, judge: Judge | None, turn: Round) -> Measurement:
    """Return the samples/s of a training, and the judge's figures if the turn is judged."""
    rate = training.samples / training.seconds
    measurement = Measurement(rate, training.train_loss, mfu=mfu_at(rate, training.summary))
    if judge is None or training.model is None or not turn.judged:
        return measurement
    loss, accuracy = judge.evaluate(training.model)
    return dataclasses.replace(measurement, evaluation_loss=loss, accuracy=accuracy)


def mfu_at(rate: float, summary: Mapping[str, float]) -> float | None:
    """Return the MFU at a rate in samples/s, scaled from the MFU in a recipe's summary.

    The summary's figure may include updates that the benchmark leaves out.
    """
    if "perf/mfu" not in summary:
        return None
    return summary["perf/mfu"] * rate / summary["perf/samples_per_second"]
