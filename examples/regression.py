"""Predict a number instead of a class: Friedman's first regression problem.

    python examples/regression.py

A copy of recipes/mnist_mlp.py. It shows data made in memory (`TensorSamples`), an objective to
minimise, and metrics that are not means: RMSE and R², from sums over all samples.

Result: RMSE 1.18 on test data (noise alone: 1.0).
One run with the default flags: torch 2.13, bf16, two cores of an AMD EPYC.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import make_friedman1
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
    learning_rate: float = 3e-3  # Peak learning rate.
    weight_decay: float = 0.0  # Decay of weight matrices; biases have none.
    # Widths of the hidden layers.
    hidden_sizes: tuple[int, ...] = flag((512, 512), least=1, most=10**6, role="size")
    dropout: float = flag(0.0, least=0, most=1)  # Share of activations dropped while training.


OBJECTIVE = "rmse:min"
DEFAULT_EPOCHS = {"other": 15}

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> Data:
    inputs, targets = make_friedman1(5000, noise=1.0, random_state=0)
    inputs = inputs.astype("float32")
    targets = targets.astype("float32")
    parts = {"train": slice(4000), "validation": slice(4000, 4500), "test": slice(4500, None)}
    splits = {
        name: TensorSamples(inputs=inputs[rows], targets=targets[rows])
        for name, rows in parts.items()
    }
    return Data("friedman", splits)


# -------------------------------------------------------------------------------------- Model


class MLP(nn.Module):
    """Linear layers with ReLU between: [batch, features] to [batch]."""

    def __init__(self, in_features: int, hidden_sizes: list[int], dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(dropout)]
            in_features = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(in_features, 1)
        self.gradient_checkpointing = False  # recompute the body in the backward pass

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and self.training:
            features = recompute(self.body, features)
        else:
            features = self.body(features)
        return self.head(features).squeeze(-1)


def build_model(config: Config, data: Data) -> tuple[nn.Module, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "in_features": data.splits["train"].tensors["inputs"].shape[1],
        "hidden_sizes": list(config.hidden_sizes),
        "dropout": config.dropout,
    }
    model = MLP(**arguments)
    model.gradient_checkpointing = config.gradient_checkpointing
    sizes = [arguments["in_features"], *config.hidden_sizes, 1]
    name = f"MLP {'-'.join(map(str, sizes))}"
    return model, {"name": name, "arguments": arguments}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    predictions = model(batch["inputs"])
    return F.mse_loss(predictions, batch["targets"]), predictions


def metrics(predictions: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    return {"absolute_error": (predictions - batch["targets"]).abs()}


def figures(totals: Totals) -> dict[str, Any]:
    mse = totals["loss"] / totals["count"]
    mean = totals["targets"] / totals["count"]
    variance = totals["squares"] / totals["count"] - mean**2  # of the targets
    return {"loss": mse, "rmse": mse**0.5, "r2": 1 - mse / variance}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = Sums(run.accelerator, figures)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, _ = compute_loss(bare_model, batch)
            targets = batch["targets"].double()
            sums.add(
                len(targets),
                loss=loss * len(targets),
                targets=targets.sum(),
                squares=targets.square().sum(),
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
                loss, predictions = compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.record(loss, metrics(predictions, batch))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
