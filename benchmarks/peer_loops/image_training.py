"""Textbook trainings on images that are evaluated after each epoch, in PyTorch and Accelerate.

They have the data of `textbook.py`: arrays in memory, transformed sample by sample. Nothing is
imported from the recipes' `common`, so that a fresh process can run them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR
from torch.utils.data import DataLoader

from benchmarks.harness.isolation import default_device
from benchmarks.harness.precisions import ACCELERATE_PRECISIONS, AUTOCAST_TYPES
from benchmarks.peer_loops.image_models import build_model
from benchmarks.peer_loops.textbook import ImageArrays, TransformedImages
from benchmarks.peer_loops.watch import Predictions, Watch


@dataclass(frozen=True)
class ImageSettings:
    """The settings of a training on images."""

    framework: Literal["pytorch", "accelerate"]
    model: Literal["mlp", "cnn", "resnet9", "resnet18"]
    optimizer: Literal["rmsprop", "adadelta", "sgd"]
    learning_rate: float
    epochs: int
    batch_size: int
    evaluation_batch_size: int
    precision: str = "fp32"  # or bf16
    momentum: float = 0.0  # of SGD
    weight_decay: float = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"  # changes after each epoch
    gamma: float = 1.0  # factor of the schedule "step"
    crop_padding: int = 0  # in pixels
    flip: bool = False

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        parameters = model.parameters()
        if self.optimizer == "rmsprop":
            # Keras' defaults differ from PyTorch's.
            return torch.optim.RMSprop(parameters, self.learning_rate, alpha=0.9, eps=1e-7)
        if self.optimizer == "adadelta":
            return torch.optim.Adadelta(parameters, self.learning_rate)
        return torch.optim.SGD(
            parameters, self.learning_rate, self.momentum, weight_decay=self.weight_decay
        )

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the schedule, which takes a step after each epoch."""
        if self.schedule == "cosine":
            return CosineAnnealingLR(optimizer, T_max=self.epochs)
        gamma = self.gamma if self.schedule == "step" else 1.0
        return StepLR(optimizer, step_size=1, gamma=gamma)


@dataclass(frozen=True)
class ImageSplits:
    """The data of a training."""

    train: ImageArrays
    evaluated: ImageArrays

    @classmethod
    def read(cls, folder: Path) -> ImageSplits:
        """Read the arrays of both splits."""
        return cls(ImageArrays.read(folder), ImageArrays.read(folder, "evaluated"))

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.train.labels.max()) + 1

    def build_model(self, name: str) -> nn.Module:
        """Return a model for these images."""
        _, channels, image_size, _ = self.train.images.shape
        return build_model(name, channels, image_size, self.classes)

    def loaders(self, settings: ImageSettings) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return the loaders for training and for evaluation.

        They have no workers, which would take the CPU's cores from the training.
        """
        train = TransformedImages(self.train, settings.crop_padding, settings.flip)
        evaluated = TransformedImages(self.evaluated, crop_padding=0, flip=False)
        return (
            DataLoader(train, settings.batch_size, shuffle=True),
            DataLoader(evaluated, settings.evaluation_batch_size),
        )


def train(settings: ImageSettings, splits: ImageSplits, seed: int, watch: Watch) -> nn.Module:
    """Train until the epochs are over or `watch` ends it; return the bare model."""
    loop = train_accelerate if settings.framework == "accelerate" else train_pytorch
    return loop(settings, splits, seed, watch)


def train_pytorch(
    settings: ImageSettings, splits: ImageSplits, seed: int, watch: Watch
) -> nn.Module:
    """Train with a plain PyTorch loop, under autocast unless the precision is fp32."""
    set_seed(seed)
    device = default_device()
    model = splits.build_model(settings.model).to(device)
    optimizer = settings.build_optimizer(model)
    scheduler = settings.build_schedule(optimizer)
    train_loader, evaluation_loader = splits.loaders(settings)
    autocast = torch.autocast(
        device.type,
        AUTOCAST_TYPES.get(settings.precision),
        enabled=settings.precision in AUTOCAST_TYPES,
    )
    watch.begin(len(train_loader))
    for _ in range(settings.epochs):
        model.train()
        total_loss = 0.0
        for batch in train_loader:
            images, labels = (tensor.to(device) for tensor in batch)
            optimizer.zero_grad()
            with autocast:
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
            if not watch.update(len(labels)):
                break
        watch.evaluation_begins()
        model.eval()
        predictions = Predictions()
        with torch.no_grad(), autocast:
            for batch in evaluation_loader:
                images, labels = (tensor.to(device) for tensor in batch)
                predictions.add(model(images).argmax(-1), labels)
        if not watch.evaluation_ended(predictions.figures()):
            break
        scheduler.step()
    return model


def train_accelerate(
    settings: ImageSettings, splits: ImageSplits, seed: int, watch: Watch
) -> nn.Module:
    """Train with a loop after Accelerate's `examples/cv_example.py`."""
    accelerator = Accelerator(
        cpu=default_device().type == "cpu",
        mixed_precision=ACCELERATE_PRECISIONS.get(settings.precision, settings.precision),
    )
    set_seed(seed)
    model = splits.build_model(settings.model)
    optimizer = settings.build_optimizer(model)
    # The schedule steps after each epoch, and not with the optimizer, so it is not prepared.
    scheduler = settings.build_schedule(optimizer)
    model, optimizer, train_loader, evaluation_loader = accelerator.prepare(
        model, optimizer, *splits.loaders(settings)
    )
    watch.begin(len(train_loader))
    for _ in range(settings.epochs):
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not watch.update(len(labels)):
                break
        watch.evaluation_begins()
        model.eval()
        predictions = Predictions()
        for images, labels in evaluation_loader:
            with torch.no_grad():
                predicted = model(images).argmax(-1)
            predictions.add(*accelerator.gather_for_metrics((predicted, labels)))
        if not watch.evaluation_ended(predictions.figures()):
            break
        scheduler.step()
    return accelerator.unwrap_model(model)
