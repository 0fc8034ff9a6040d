"""Train a small, fast network on CIFAR-10, or on any other small images and classes.

The default is CIFAR-10, or without a network scikit-learn's digits:
    python recipes/cifar10_fast.py
With one evaluation, it has 94.05 ± 0.11 % test accuracy with test-time augmentation (9 seeds), and
93.16 ± 0.16 % without it, in 18 minutes on two cores (docs/results.md):
    python recipes/cifar10_fast.py --dataset cifar10 --eval-every 1000
All GPUs of this machine (several machines: see docs/several-processes.md):
    accelerate launch recipes/cifar10_fast.py

The network and the ideas are those of airbench94 (arXiv 2404.00498 and its repository): a fixed
first layer that whitens patches, filters that begin as the identity, alternating flips, and Muon.
"""

from dataclasses import dataclass
from typing import Any, Literal

from common.console import begin

if __name__ == "__main__":
    begin()  # shows progress during the imports; Ctrl-C then ends with one sentence

import torch
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.images import ImageData, load_images
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.sources import choose_source
from common.errors import UserError
from common.flags import flag
from common.measure.classification import ClassificationSums
from common.models.compile import compile_model
from common.models.convolution import Convolution
from common.models.recompute import recompute
from common.models.tta import Views
from common.models.whitening import whitening_filters
from common.run import Run
from common.training.muon import Muon, MuonGroup

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = 500  # Samples per process and micro-batch.
    learning_rate: float = 0.12  # Peak learning rate of the convolutions.
    bias_rate: float = flag(26.0, least=0)  # Peak learning rate of the batch norms' biases.
    head_rate: float = flag(0.005, least=0)  # Peak learning rate of the last layer.
    weight_decay: float = 0.2  # Decay of the last layer; convolutions and biases have none.
    max_grad_norm: float = 0.0  # Clip gradients' global L2 norm; 0 turns it off.
    # Channels of each stage.
    widths: tuple[int, ...] = flag((64, 256, 256), least=1, most=10**5, role="size")
    label_smoothing: float = flag(0.2, least=0, most=1)  # Share of the target spread over classes.
    horizontal_flip: bool | None = None  # Mirror images every other epoch (default: if in colour).
    keep: Literal["best", "last"] = "last"  # Which model to export: the best one, or the last one.
    # Height and width in pixels (default: by data set, at most 224).
    image_size: int | None = flag(None, least=1, most=65536, role="size")
    image_column: str | None = flag(None, role="data")  # Column of images, if it can't be inferred.


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"cifar10": 10, "mnist": 2, "digits": 30, "synthetic": 1, "other": 8}
DEFAULT_SIZES = {"digits": 16}  # pixels

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> ImageData:
    source = choose_source(
        config, run.accelerator, public="cifar10", built_in="digits", public_on_cpu=True
    )
    data = load_images(
        source,
        image_size=config.image_size or DEFAULT_SIZES.get(source.name),
        image_column=config.image_column,
        label_column=config.label_column,
        dtype=run.compute_dtype,
        init_from=config.init_from,
    )
    data.splits["train"].flip = data.wants_flip(config.horizontal_flip)
    data.splits["train"].max_shift = data.image_size // 16
    return data


# -------------------------------------------------------------------------------------- Model


class Stage(nn.Module):
    """Two 3×3 convolutions with batch norm and GELU; pooling after the first halves the image."""

    def __init__(self, in_channels: int, width: int):
        super().__init__()
        self.conv1, self.bn1 = conv_bn(in_channels, width)
        self.conv2, self.bn2 = conv_bn(width, width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.gelu(self.bn1(F.max_pool2d(self.conv1(images), 2)))
        return F.gelu(self.bn2(self.conv2(features)))


def conv_bn(in_channels: int, width: int) -> tuple[nn.Module, nn.Module]:
    convolution = Convolution(in_channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[:in_channels])  # its first channels begin as the identity
    norm = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad = False  # the next convolution can learn the scale
    return convolution, norm


class FastNet(nn.Module):
    """A fixed layer that whitens patches, stages of convolutions, and a linear layer.

    It maps images [batch, channels, height, width] to logits [batch, classes].
    """

    def __init__(self, channels: int, widths: list[int], classes: int):
        super().__init__()
        patch_size = channels * 2 * 2
        self.whiten = nn.Conv2d(channels, 2 * patch_size, kernel_size=2, bias=False)
        self.whiten.weight.requires_grad = False
        sizes = [2 * patch_size, *widths]
        self.stages = nn.Sequential(*map(Stage, sizes[:-1], sizes[1:]))
        self.head = nn.Linear(widths[-1], classes, bias=False)
        nn.init.zeros_(self.head.weight)
        self.gradient_checkpointing = False  # recompute each stage in the backward pass

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.gelu(self.whiten(images))
        recomputed = self.gradient_checkpointing and self.training
        for stage in self.stages:
            features = recompute(stage, features) if recomputed else stage(features)
        return self.head(features.amax((2, 3)))


def build_model(config: Config, data: ImageData) -> tuple[nn.Module, dict[str, Any]]:
    smallest_size = 2 ** len(config.widths) + 1  # stages halve; patches of 2×2 need a pixel more
    if data.image_size < smallest_size:
        raise UserError(
            f"images of {data.image_size} pixels are too small for {len(config.widths)} stages",
            advice=f"pass --image-size {smallest_size} or more, or fewer --widths",
        )
    arguments: dict[str, Any] = {
        "channels": data.channels,
        "widths": list(config.widths),
        "classes": len(data.class_names),
    }
    model = FastNet(**arguments)
    image_count = max(1, 5000 * 32**2 // data.image_size**2)  # as many pixels as 5,000 of CIFAR-10
    images = data.splits["train"].first_images(image_count)
    model.whiten.weight.data = whitening_filters(images, kernel_size=2)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.gradient_checkpointing = config.gradient_checkpointing
    return model, {"name": "FastNet", "arguments": arguments, **data.preprocessing()}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    head = model.get_parameter("head.weight")
    groups: list[MuonGroup] = [
        {"params": [p for p in trained if p.ndim == 4], "orthogonal": True, "momentum": 0.6},
        {"params": [p for p in trained if p.ndim == 1], "lr": config.bias_rate},
        {"params": [head], "lr": config.head_rate, "weight_decay": config.weight_decay},
    ]
    return Muon(groups, lr=config.learning_rate, momentum=0.85)  # momenta as in airbench94


def compute_loss(
    model: nn.Module, batch: Batch, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:  # train/loss has smoothed labels, val/loss does not
    logits = model(batch["images"])
    return F.cross_entropy(logits, batch["labels"], label_smoothing=label_smoothing), logits


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
        scheduler = run.plan.schedule(optimizer, warmup_share=0.0)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # what checkpoints save
        run.start(description, compute_loss)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model):
                loss, logits = compute_loss(model, batch, config.label_smoothing)
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
        # Views come first, because the run exports the model that is evaluated last.
        views = Views(accelerator.unwrap_model(model))  # test-time augmentation
        accuracy_tta = evaluate(run, views, test_loader)["accuracy"]
        run.finish(evaluate(run, model, test_loader) | {"accuracy_tta": accuracy_tta})


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
