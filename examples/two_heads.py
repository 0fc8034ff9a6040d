"""Train two heads on one body in turns: the class of a digit, and how bright its quarters are.

    python examples/two_heads.py

A copy of recipes/mnist_mlp.py. Each update trains one head. A batch records only the metrics of its
task, and each metric is the mean over the batches that recorded it. `find_unused_parameters` tells
DistributedDataParallel that an update leaves out one head.

Result: 96.9 % test accuracy.
One run with --num-threads 1: torch 2.13, bf16, two cores of an AMD EPYC.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.images import ImageData, load_images
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.sources import choose_source
from common.flags import flag
from common.measure.sums import Sums
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
    # Height and width in pixels (default: by data set, at most 224).
    image_size: int | None = flag(None, least=1, most=65536, role="size")
    image_column: str | None = flag(None, role="data")  # Column of images, if it can't be inferred.


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"mnist": 10, "digits": 30, "synthetic": 1, "other": 10}
DEFAULT_SIZES = {"synthetic": 28}  # pixels

TASKS = ("digit", "brightness")  # one update each, in turns

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
        init_from=config.init_from,
    )


# -------------------------------------------------------------------------------------- Model


class MLP(nn.Module):
    """Two heads on one body: [batch, channels, height, width] to [batch, classes] or [batch, 4]."""

    def __init__(self, in_features: int, hidden_sizes: list[int], classes: int, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(dropout)]
            in_features = width
        self.body = nn.Sequential(*layers)
        self.digit = nn.Linear(in_features, classes)
        self.brightness = nn.Linear(in_features, 4)
        self.gradient_checkpointing = False  # recompute the body in the backward pass

    def forward(self, images: torch.Tensor, task: str = "digit") -> torch.Tensor:
        features = images.flatten(1)
        if self.gradient_checkpointing and self.training:
            features = recompute(self.body, features)
        else:
            features = self.body(features)
        return self.digit(features) if task == "digit" else self.brightness(features)


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


def quarters(batch: Batch) -> torch.Tensor:
    """Return the mean brightness of each quarter of an image, [batch, 4]."""
    return F.adaptive_avg_pool2d(batch["images"].float().mean(1, keepdim=True), 2).flatten(1)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(
    model: nn.Module, batch: Batch, task: str = "digit"
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = model(batch["images"], task)
    if task == "digit":
        return F.cross_entropy(outputs, batch["labels"]), outputs
    return F.mse_loss(outputs.float(), quarters(batch)), outputs


def metrics(outputs: torch.Tensor, batch: Batch, task: str) -> dict[str, torch.Tensor]:
    if task == "brightness":
        return {"absolute_error": (outputs - quarters(batch)).abs()}
    return {"accuracy": outputs.argmax(-1) == batch["labels"]}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = Sums(run.accelerator)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, outputs = compute_loss(bare_model, batch)
            named = metrics(outputs, batch, "digit")
            outputs = bare_model(batch["images"], "brightness")
            named |= metrics(outputs, batch, "brightness")
            # A mask waits for the device, so the loop does not record this metric. A batch without
            # a zero leaves it out.
            zeros = named["accuracy"][batch["labels"] == 0]
            if len(zeros):
                named["zeros_found"] = zeros
            sums.record(loss, named, len(batch["labels"]))
    return sums.result()


# --------------------------------------------------------------------------------------- Main


def main(config: Config) -> None:
    # Each update leaves one head without gradients, for which DDP would wait otherwise.
    with Run(config, __file__, OBJECTIVE, ddp={"find_unused_parameters": True}) as run:
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
            task = TASKS[run.progress.global_step % 2]
            with accelerator.accumulate(model):
                loss, outputs = compute_loss(model, batch, task)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.record(loss, {f"{task}_loss": loss, **metrics(outputs, batch, task)})
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
