"""A small recipe that uses every way of recording metrics, for tests/runs/test_figures.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.dataset import Data, DatasetSamples
from common.data.loader import Loader
from common.data.samples import Batch
from common.measure.sums import Sums, Totals
from common.run import Run

SIZES = {"train": 96, "validation": 37, "test": 23, "bank": 11}
POSITIONS = 6


@dataclass(kw_only=True)
class Config(TrainingConfig):
    """The flags of the recipe."""

    batch_size: int = 8
    learning_rate: float = 0.01
    rehearse: bool = True  # Whether the evaluation is rehearsed.
    mistake: str = "none"  # The mistake that the evaluation makes.


class Points:
    """Samples of random points with a mask, and the number of each sample, from 1."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.x = torch.randn(SIZES[split], POSITIONS, 3, generator=generator)
        self.mask = torch.rand(SIZES[split], POSITIONS, generator=generator) < 0.7
        self.mask[:, 0] = True

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self.x[index]
        number = torch.tensor(index + 1.0)
        return {"x": x, "mask": self.mask[index], "labels": (x[:, 0] > 0).long(), "number": number}


class Classifier(nn.Module):
    """Classifies points by the sign of their first coordinate; has buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits [points in the mask, 2]."""
        return self.head(self.norm(self.body(x)[mask]))


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of the points in the mask, and their logits."""
    logits = model(batch["x"], batch["mask"])
    return F.cross_entropy(logits, batch["labels"][batch["mask"]]), logits


def figures(totals: Totals) -> dict[str, Any]:
    """Return the totals unchanged."""
    names = ("bank", "real", "gathered", "equal_batches")
    return {name: totals[name] for name in names if name in totals}


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    """Return means, totals, and the means of random numbers."""
    mistake = run.config.mistake
    if mistake in ("loss as total", "metric as total"):
        return evaluate_with_mean(run, model, loader)
    sums = Sums(run.accelerator, figures)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            if mistake == "error":
                raise ValueError("a mistake in evaluate")
            loss, logits = compute_loss(bare_model, batch)
            drawn = {"torch": torch.rand(5), "numpy": np.random.rand(), "python": random.random()}
            hits = logits.argmax(-1) == batch["labels"][batch["mask"]]
            sums.record(loss, {"accuracy": hits, **drawn}, len(batch["x"]))
        for batch, is_real in run.equal_batches(loader):
            numbers = batch["number"] * is_real
            everywhere = run.gather(numbers).sum() / run.accelerator.num_processes
            sums.add(0, real=numbers.sum(), gathered=everywhere, equal_batches=1)
        for batch in run.all_loaders["bank"]:
            sums.add(0, bank=batch["number"].sum())
    result = sums.result()
    if mistake == "name":
        result["correct"] = result.pop("accuracy")
    return result


def evaluate_with_mean(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    """Make a mistake: pass means as totals."""
    sums = Sums(run.accelerator)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            count = len(batch["x"])
            loss, logits = compute_loss(bare_model, batch)
            confidence = logits.softmax(-1).amax(-1)
            if run.config.mistake == "loss as total":
                sums.add(count, loss=loss, accuracy=confidence.sum())
            else:
                sums.add(count, loss=loss * count, accuracy=confidence.mean())
    return sums.result()


def main(config: Config) -> None:
    """Train without a scheduler, in two groups of parameters."""
    with Run(config, __file__, "accuracy:max", rehearse=config.rehearse) as run:
        accelerator = run.accelerator
        data = Data("points", {name: DatasetSamples(Points(name)) for name in SIZES})
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, {"points": 3})
        model: Any = Classifier()
        groups = [
            {"params": [*model.body.parameters(), *model.norm.parameters()]},
            {"params": model.head.parameters(), "lr": 2 * config.learning_rate, "name": "head"},
        ]
        optimizer: Any = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        run.keep(model=model, optimizer=optimizer)
        run.start({"name": "points", "arguments": {}}, compute_loss)
        for batch in run.batches(train_loader):
            if run.should_evaluate:
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:
                break
            with accelerator.accumulate(model):
                loss, _ = compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            rank_metrics = {"first": 100} if accelerator.is_main_process else {"second": True}
            run.record(loss, {"epoch": run.epoch, **rank_metrics})
            if run.should_save:
                run.save()
        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        run.load_best(model)
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__ or ""))
