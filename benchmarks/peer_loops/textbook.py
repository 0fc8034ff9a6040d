"""Textbook training loops on images: PyTorch, Accelerate as in its examples, Lightning Fabric.

A competent user writes such loops after reading the documentation. The data set lies in memory as
uint8, as torchvision's MNIST and CIFAR-10 do. `__getitem__` turns each sample into a normalised
tensor, and a `DataLoader` shuffles and collates. Nothing is imported from the recipes' `common`, so
that a fresh process can run these loops alone.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.harness.clock import LoopClock
from benchmarks.harness.isolation import default_device
from benchmarks.harness.precisions import (
    ACCELERATE_PRECISIONS,
    AUTOCAST_TYPES,
    LIGHTNING_PRECISIONS,
)
from benchmarks.harness.rounds import FinishedTraining

ImageBatch = tuple[torch.Tensor, torch.Tensor]  # images and labels


@dataclass(frozen=True)
class ImageArrays:
    """A split in host memory: uint8 [samples, channels, height, width], int64 labels [samples]."""

    images: torch.Tensor
    labels: torch.Tensor
    mean: list[float]  # by channel, of pixels scaled to 0 … 1
    std: list[float]

    @classmethod
    def read(cls, folder: Path, split: str = "train") -> ImageArrays:
        """Read decoded arrays whole, as torchvision reads its data sets' files."""
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        images = torch.from_numpy(np.load(folder / f"{split}_images.npy")).permute(0, 3, 1, 2)
        labels = torch.from_numpy(np.load(folder / f"{split}_labels.npy"))
        return cls(images.contiguous(), labels, facts["mean"], facts["std"])


class TransformedImages(Dataset[tuple[torch.Tensor, int]]):
    """Images with ToTensor, RandomCrop, RandomHorizontalFlip and Normalize, applied per sample."""

    def __init__(self, arrays: ImageArrays, crop_padding: int, flip: bool) -> None:
        self.images = arrays.images
        self.labels = arrays.labels
        self.crop_padding = crop_padding  # in pixels; 0: no crop
        self.flip = flip
        self.mean = torch.tensor(arrays.mean).view(-1, 1, 1)
        self.std = torch.tensor(arrays.std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].to(torch.float32).div(255)
        if self.crop_padding:
            height, width = image.shape[1:]
            padded = F.pad(image, [self.crop_padding] * 4)
            top, left = torch.randint(0, 2 * self.crop_padding + 1, (2,)).tolist()
            image = padded[:, top : top + height, left : left + width]
        if self.flip and torch.rand(1).item() < 0.5:
            image = image.flip(-1)
        return image.sub(self.mean).div_(self.std), int(self.labels[index])


def ready_tensors(arrays: ImageArrays) -> TensorDataset:
    """Normalise the whole data set once; a plain DataLoader over it is as fast as it gets."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (arrays.mean, arrays.std))
    return TensorDataset((arrays.images / 255 - mean) / std, arrays.labels)


@dataclass(frozen=True)
class Task:
    """A training, the same for all contestants of a suite."""

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    dataset: Dataset[Any]
    batch_size: int
    warmup_share: float  # of the updates; the learning rate then falls linearly to 0
    label_smoothing: float = 0.0

    def build_schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
        """Return a schedule of linear warm-up and linear decay over all updates."""
        warmup = int(self.warmup_share * updates)

        def factor(update: int) -> float:
            if update < warmup:
                return (update + 1) / (warmup + 1)
            return max(0.0, (updates - update) / max(1, updates - warmup))

        return LambdaLR(optimizer, factor)

    def build_loader(self, device: torch.device) -> DataLoader[Any]:
        """Return a DataLoader. It has workers beside a GPU; on a CPU they would take its cores."""
        workers = 0 if device.type == "cpu" else min(8, os.cpu_count() or 1)
        return DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=device.type != "cpu",
            persistent_workers=workers > 0,
        )


def first_batches(loader: Iterable[ImageBatch], count: int) -> Iterator[ImageBatch]:
    """Yield `count` batches of one epoch after the other."""
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count)


# Of a task, a precision, a number of timed updates, a seed, and a number of updates before them.
TextbookLoop = Callable[[Task, str, int, int, int], FinishedTraining]


def train_pytorch(
    task: Task, precision: str, updates: int, seed: int, untimed: int = 0
) -> FinishedTraining:
    """Train with a plain PyTorch loop under autocast that adds up `loss.item()`."""
    set_seed(seed)
    device = default_device()
    model = task.build_model().to(device)
    optimizer = task.build_optimizer(model)
    scheduler = task.build_schedule(optimizer, untimed + updates)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    loader = task.build_loader(device)
    autocast = torch.autocast(
        device.type, AUTOCAST_TYPES.get(precision), enabled=precision in AUTOCAST_TYPES
    )
    model.train()
    total_loss = 0.0
    clock = LoopClock(untimed)
    clock.start()
    for images, labels in first_batches(loader, untimed + updates):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with autocast:
            logits = model(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=task.label_smoothing)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        total_loss += loss.item()
        clock.update()
    seconds = clock.stop()
    mean_loss = total_loss / (untimed + updates)
    return FinishedTraining(seconds, updates * task.batch_size, mean_loss, model)


def train_accelerate(
    task: Task, precision: str, updates: int, seed: int, untimed: int = 0
) -> FinishedTraining:
    """Train as Accelerate's `complete_cv_example.py` does."""
    mixed_precision = ACCELERATE_PRECISIONS.get(precision, precision)
    on_cpu = default_device().type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=mixed_precision)
    set_seed(seed)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    scheduler = task.build_schedule(optimizer, untimed + updates)
    loader = task.build_loader(accelerator.device)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    total_loss = torch.zeros((), device=accelerator.device)
    clock = LoopClock(untimed)
    clock.start()
    for images, labels in first_batches(loader, untimed + updates):
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=task.label_smoothing)
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.update()
    seconds = clock.stop()
    mean_loss = total_loss.item() / (untimed + updates)
    return FinishedTraining(
        seconds, updates * task.batch_size, mean_loss, accelerator.unwrap_model(model)
    )


def train_fabric(
    task: Task, precision: str, updates: int, seed: int, untimed: int = 0
) -> FinishedTraining:
    """Train with Lightning Fabric as its guide "convert PyTorch to Fabric" shows."""
    from lightning.fabric import Fabric

    device = default_device()
    fabric = Fabric(accelerator=device.type, devices=1, precision=LIGHTNING_PRECISIONS[precision])
    set_seed(seed)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    scheduler = task.build_schedule(optimizer, untimed + updates)
    model, optimizer = fabric.setup(model, optimizer)
    # One loader comes back for one loader; the declared type allows a list of them.
    loader: Iterable[tuple[torch.Tensor, torch.Tensor]]
    loader = fabric.setup_dataloaders(task.build_loader(device))  # type: ignore[assignment]
    model.train()
    total_loss = 0.0
    clock = LoopClock(untimed)
    clock.start()
    for images, labels in first_batches(loader, untimed + updates):
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=task.label_smoothing)
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        total_loss += loss.item()
        clock.update()
    seconds = clock.stop()
    mean_loss = total_loss / (untimed + updates)
    return FinishedTraining(seconds, updates * task.batch_size, mean_loss, model.module)
