"""Train a small network to imitate a larger one: distillation (arXiv 1503.02531).

    python examples/distilled.py

A copy of recipes/mnist_mlp.py. It shows a second network that no checkpoint holds: each start of
the run trains the teacher again in less than a second, with the same result on every process. The
teacher is neither prepared by the Accelerator nor passed to run.keep(...).

Result: 92.5 % test accuracy.
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
    # Widths of the hidden layers.
    hidden_sizes: tuple[int, ...] = flag((16,), least=1, most=10**6, role="size")
    dropout: float = flag(0.0, least=0, most=1)  # Share of activations dropped while training.
    # Updates of the teacher, each with all samples.
    teacher_updates: int = flag(60, least=1, most=10**6)
    temperature: float = flag(2.0, least=0.1)  # Divisor of both networks' logits.
    # Height and width in pixels (default: by data set, at most 224).
    image_size: int | None = flag(None, least=1, most=65536, role="size")
    image_column: str | None = flag(None, role="data")  # Column of images, if it can't be inferred.


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"mnist": 10, "digits": 30, "synthetic": 1, "other": 10}
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
        init_from=config.init_from,
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


def build_teacher(config: Config, data: ImageData, train_loader: Loader) -> nn.Module:
    """Train a wider network on all samples; return it frozen, in evaluation mode."""
    in_features = data.channels * data.image_size**2
    teacher = MLP(in_features, [256], len(data.class_names), 0.0).to(train_loader.device)
    batch = train_loader.batch_of(torch.arange(len(train_loader.samples)))
    batch["images"] = batch["images"].float()
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=5e-3)
    for _ in range(config.teacher_updates):
        optimizer.zero_grad()
        compute_loss(teacher, batch)[0].backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["images"])
    return F.cross_entropy(logits, batch["labels"]), logits


def distillation_loss(
    logits: torch.Tensor, teacher: nn.Module, batch: Batch, temperature: float
) -> torch.Tensor:
    """Return the KL divergence from the teacher; temperature² makes up for smaller gradients."""
    teacher_logits = teacher(batch["images"].float())
    target = F.log_softmax(teacher_logits / temperature, dim=-1)
    predicted = F.log_softmax(logits.float() / temperature, dim=-1)
    return F.kl_div(predicted, target, reduction="batchmean", log_target=True) * temperature**2


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
        teacher = build_teacher(config, data, train_loader)
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
                loss = loss + distillation_loss(logits, teacher, batch, config.temperature)
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
