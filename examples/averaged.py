"""Evaluate averaged weights (EMA), with mixup, early stopping and a cosine schedule.

    python examples/averaged.py

A copy of recipes/mnist_mlp.py. The average is evaluated, kept in checkpoints, and exported at the
end. It also shows how a recipe changes defaults of shared flags.

Result: 98.1 % test accuracy.
One run with --num-threads 1: torch 2.13, bf16, two cores of an AMD EPYC.
"""

import random
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.config import TrainingConfig, parse_config
from common.data.images import ImageData, load_images
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.sources import choose_source
from common.flags import flag
from common.measure.classification import ClassificationSums
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
    # Shape of the learning rate after warm-up.
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    # Widths of the hidden layers.
    hidden_sizes: tuple[int, ...] = flag((512, 512), least=1, most=10**6, role="size")
    dropout: float = flag(0.0, least=0, most=1)  # Share of activations dropped while training.
    decay: float = flag(0.98, least=0, most=1)  # Share of the average that an update keeps.
    # Parameter of the Beta distribution of mixing shares; 0: no mixup.
    mixup: float = flag(0.2, least=0)
    early_stopping: int | None = 5  # Stop after this many evaluations without a better one.
    validation_share: float | None = 0.1  # Share of train held out for early stopping.
    # Height and width in pixels (default: by data set, at most 224).
    image_size: int | None = flag(None, least=1, most=65536, role="size")
    image_column: str | None = flag(None, role="data")  # Column of images, if it can't be inferred.


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"mnist": 20, "digits": 100, "synthetic": 1, "other": 20}
DEFAULT_SIZES = {"synthetic": 28}  # pixels

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> ImageData:
    source = choose_source(
        config, run.accelerator, public="mnist", built_in="digits", public_on_cpu=True
    )
    return load_images(
        source,
        image_size=config.image_size or DEFAULT_SIZES.get(source.name),
        image_column=config.image_column,
        label_column=config.label_column,
        dtype=run.compute_dtype,
    )


# -------------------------------------------------------------------------------------- Model


class MLP(nn.Module):
    """Linear layers with ReLU between: [batch, channels, height, width] to [batch, classes]."""

    def __init__(self, in_features: int, hidden_sizes: list[int], classes: int, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(dropout)]
            in_features = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(in_features, classes)
        self.gradient_checkpointing = False  # recompute the body in the backward pass

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = images.flatten(1)
        if self.gradient_checkpointing and self.training:
            features = recompute(self.body, features)
        else:
            features = self.body(features)
        return self.head(features)


def build_model(config: Config, data: ImageData) -> tuple[nn.Module, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "in_features": data.channels * data.image_size**2,
        "hidden_sizes": list(config.hidden_sizes),
        "classes": len(data.class_names),
        "dropout": config.dropout,
    }
    model = MLP(**arguments)
    model.gradient_checkpointing = config.gradient_checkpointing
    sizes = [arguments["in_features"], *config.hidden_sizes, arguments["classes"]]
    name = f"MLP {'-'.join(map(str, sizes))}"
    return model, {"name": name, "arguments": arguments, **data.preprocessing()}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(
    model: nn.Module, batch: Batch, mixup: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    images = batch["images"]
    labels = batch["labels"]
    if not mixup:
        logits = model(images)
        return F.cross_entropy(logits, labels), logits
    share = 0.5 - abs(0.5 - random.betavariate(mixup, mixup))  # the smaller of the two shares
    logits = model(images.lerp(images.flip(0), share))  # mix each image with another of the batch
    own_loss = F.cross_entropy(logits, labels)
    other_loss = F.cross_entropy(logits, labels.flip(0))
    return own_loss.lerp(other_loss, share), logits


def metrics(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    return {"accuracy": logits.argmax(-1) == batch["labels"]}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = ClassificationSums(run.accelerator, run.data.class_names)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            sums.add(loss, logits, batch["labels"])
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
        average = AveragedModel(
            accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(config.decay)
        )
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
        run.start(description, compute_loss)  # resumes, opens the logs, shows the plan
        if average.n_averaged == 0:
            average.update_parameters(model)  # from the model's first weights

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, average, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model):
                loss, logits = compute_loss(model, batch, config.mixup)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    average.update_parameters(model)
            run.record(loss, metrics(logits, batch))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, average, validation_loader))
        run.load_best(average)  # unless --keep last
        run.finish(evaluate(run, average, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
