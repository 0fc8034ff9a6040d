"""Predict several labels for each image: whether a digit is even, has a loop, is large, is prime.

    python examples/multi_label.py

A copy of recipes/mnist_mlp.py. It shows a custom loss (binary cross-entropy) and an F1 score
for each label, computed from counts over all samples of all processes.

Result: macro F1 0.919 on test data.
One run with --num-threads 1: torch 2.13, bf16, two cores of an AMD EPYC.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.dataset import Data
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.stored_samples import TensorSamples
from common.flags import flag
from common.measure.sums import Sums, Totals
from common.models.compile import compile_model
from common.models.recompute import recompute
from common.run import Run
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = 64  # Samples per process and micro-batch.
    learning_rate: float = 1e-3  # Peak learning rate.
    weight_decay: float = 0.0  # Decay of weight matrices; biases have none.
    # Widths of the hidden layers.
    hidden_sizes: tuple[int, ...] = flag((512, 512), least=1, most=10**6, role="size")
    dropout: float = flag(0.0, least=0, most=1)  # Share of activations dropped while training.


OBJECTIVE = "macro_f1:max"
DEFAULT_EPOCHS = {"other": 15}
# Each label, and the digits that have it.
LABELS = {"even": "02468", "loop": "0689", "large": "56789", "prime": "2357"}

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> Data:
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    columns = [np.isin(digits, [int(digit) for digit in having]) for having in LABELS.values()]
    labels = np.stack(columns, axis=1).astype("float32")  # [samples, labels], 0 or 1
    parts = {"train": slice(1200), "validation": slice(1200, 1500), "test": slice(1500, None)}
    splits = {
        name: TensorSamples(images=images[rows], labels=labels[rows])
        for name, rows in parts.items()
    }
    return Data("digits", splits)


# -------------------------------------------------------------------------------------- Model


class MLP(nn.Module):
    """Linear layers with ReLU between: [batch, pixels] to [batch, labels]."""

    def __init__(self, in_features: int, hidden_sizes: list[int], labels: int, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(dropout)]
            in_features = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(in_features, labels)
        self.gradient_checkpointing = False  # recompute the body in the backward pass

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = images.flatten(1)
        if self.gradient_checkpointing and self.training:
            features = recompute(self.body, features)
        else:
            features = self.body(features)
        return self.head(features)


def build_model(config: Config, data: Data) -> tuple[nn.Module, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "in_features": data.splits["train"].tensors["images"].shape[1],
        "hidden_sizes": list(config.hidden_sizes),
        "labels": len(LABELS),
        "dropout": config.dropout,
    }
    model = MLP(**arguments)
    model.gradient_checkpointing = config.gradient_checkpointing
    sizes = [arguments["in_features"], *config.hidden_sizes, arguments["labels"]]
    name = f"MLP {'-'.join(map(str, sizes))}"
    return model, {"name": name, "arguments": arguments, "labels": list(LABELS)}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["images"])
    return F.binary_cross_entropy_with_logits(logits, batch["labels"]), logits


def metrics(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    return {"accuracy": (logits > 0) == (batch["labels"] > 0)}


def figures(totals: Totals) -> dict[str, Any]:
    f1 = 2 * totals["hits"] / (totals["predicted"] + totals["actual"]).clamp(min=1)
    by_label = {f"f1_{label}": value for label, value in zip(LABELS, f1, strict=True)}
    loss = totals["loss"] / totals["count"]
    return {"loss": loss, "macro_f1": f1.mean(), **by_label}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = Sums(run.accelerator, figures)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            predicted = logits > 0
            actual = batch["labels"] > 0
            sums.add(
                len(actual),
                loss=loss * len(actual),
                hits=(predicted & actual).sum(0),
                predicted=predicted.sum(0),
                actual=actual.sum(0),
            )
    return sums.result()


# --------------------------------------------------------------------------------------- Main


def main(config: Config) -> None:
    with Run(config, __file__, OBJECTIVE) as run:
        accelerator = run.accelerator
        data = load_data(config, run)
        # No need to prepare the loaders: each yields its own process's samples, on its device.
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, DEFAULT_EPOCHS)

        model, description = build_model(config, data)
        if config.compile:
            compile_model(model, config)
        optimizer = build_optimizer(model, config)
        scheduler = run.plan.schedule(optimizer, warmup_share=0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # what checkpoints save
        run.start(description, compute_loss)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model):
                loss, logits = compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.record(loss, metrics(logits, batch))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
