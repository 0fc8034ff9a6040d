"""Train a ResNet on images: CIFAR-10, or any other data set of images and classes.

The default is CIFAR-10 on a GPU. On a CPU, it is digits, with 98.0 ± 0.7 % accuracy (3 seeds):
    python recipes/resnet.py
CIFAR-10, with 94.51 % test accuracy (1 seed) in two hours on two cores (docs/results.md):
    python recipes/resnet.py --dataset cifar10 --optimizer muon --batch-size 500 --epochs 14 \
        --max-grad-norm 0 --eval-every 1000000
All GPUs of this machine (several machines: see docs/several-processes.md):
    accelerate launch recipes/resnet.py
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
from common.flags import flag
from common.measure.classification import ClassificationSums
from common.models.compile import compile_model
from common.models.convolution import Convolution
from common.models.recompute import recompute
from common.run import Run
from common.run_directory.init_from import initial_shapes
from common.training.muon import Muon, muon_groups
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = 64  # Samples per process and micro-batch.
    learning_rate: float = 0.1  # Peak learning rate.
    weight_decay: float = 5e-4  # Decay of weight matrices; with Muon, of the last layer only.
    # Optimizer; muon needs fewer epochs, but is slow with small batches.
    optimizer: Literal["sgd", "muon"] = "sgd"
    model: Literal["resnet18", "resnet34", "resnet50"] = "resnet18"  # Depth of the network.
    label_smoothing: float = flag(0.1, least=0, most=1)  # Share of the target spread over classes.
    horizontal_flip: bool | None = None  # Mirror images every other epoch (default: if in colour).
    # Height and width in pixels (default: by data set, at most 224).
    image_size: int | None = flag(None, least=1, most=65536, role="size")
    image_column: str | None = flag(None, role="data")  # Column of images, if it can't be inferred.


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"cifar10": 30, "mnist": 5, "digits": 6, "synthetic": 1, "other": 30}
WARMUP_SHARE = {"sgd": 0.2, "muon": 0.0}

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> ImageData:
    source = choose_source(
        config, run.accelerator, public="cifar10", built_in="digits", public_on_cpu=False
    )
    data = load_images(
        source,
        image_size=config.image_size,
        image_column=config.image_column,
        label_column=config.label_column,
        dtype=run.compute_dtype,
        init_from=config.init_from,
    )
    data.splits["train"].flip = data.wants_flip(config.horizontal_flip)
    data.splits["train"].max_shift = data.image_size // 8
    return data


# -------------------------------------------------------------------------------------- Model


class Block(nn.Module):
    """Two 3×3 convolutions, or 1×1, 3×3, 1×1 with four times the width, and a shortcut."""

    def __init__(self, in_channels: int, width: int, is_bottleneck: bool, stride: int = 1):
        super().__init__()
        self.is_bottleneck = is_bottleneck
        out_channels = width * 4 if is_bottleneck else width
        if is_bottleneck:  # in both cases, the first 3×3 convolution has the stride
            self.conv1, self.bn1 = conv_bn(in_channels, width, 1, 1)
            self.conv2, self.bn2 = conv_bn(width, width, 3, stride)
            self.conv3, self.bn3 = conv_bn(width, out_channels, 1, 1)
        else:
            self.conv1, self.bn1 = conv_bn(in_channels, width, 3, stride)
            self.conv2, self.bn2 = conv_bn(width, width, 3, 1)
        self.downsample = nn.Sequential()  # the shortcut; empty: the input itself
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(*conv_bn(in_channels, out_channels, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.bn1(self.conv1(images)), inplace=True)
        features = self.bn2(self.conv2(features))
        if self.is_bottleneck:
            features = self.bn3(self.conv3(F.relu(features, inplace=True)))
        return F.relu(features + self.downsample(images), inplace=True)


def conv_bn(in_channels: int, width: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = Convolution(in_channels, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(width)


class ResNet(nn.Module):
    """ResNet-18, 34 or 50 (arXiv 1512.03385): [batch, channels, height, width] to [batch, classes].

    Its parts are named as torchvision and timm name them.
    """

    WIDTHS = (64, 128, 256, 512)
    DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}

    def __init__(self, name: str, channels: int, kernel: int, classes: int):
        super().__init__()
        keeps_size = kernel == 3  # a kernel of 7, as in published weights, quarters the size
        is_bottleneck = name == "resnet50"
        self.conv1, self.bn1 = conv_bn(channels, 64, kernel, 1 if keeps_size else 2)
        self.maxpool = nn.Identity() if keeps_size else nn.MaxPool2d(3, 2, padding=1)
        stages = []
        in_channels = 64
        for stage, (width, depth) in enumerate(zip(self.WIDTHS, self.DEPTHS[name], strict=True)):
            blocks = [Block(in_channels, width, is_bottleneck, stride=1 if stage == 0 else 2)]
            in_channels = width * 4 if is_bottleneck else width
            blocks += [Block(in_channels, width, is_bottleneck) for _ in range(1, depth)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(in_channels, classes)
        self.gradient_checkpointing = False  # recompute each stage in the backward pass

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        recomputed = self.gradient_checkpointing and self.training
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = recompute(stage, features) if recomputed else stage(features)
        return self.fc(features.mean((2, 3)))


def build_model(config: Config, data: ImageData) -> tuple[nn.Module, dict[str, Any]]:
    initial_shape = initial_shapes(config.init_from).get("conv1.weight")
    default_kernel = 3 if data.image_size <= 64 else 7
    kernel = default_kernel if initial_shape is None else initial_shape[-1]
    arguments: dict[str, Any] = {
        "name": config.model,
        "channels": data.channels,
        "kernel": kernel,
        "classes": len(data.class_names),
    }
    model = ResNet(**arguments).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.gradient_checkpointing = config.gradient_checkpointing
    return model, {"name": config.model, "arguments": arguments, **data.preprocessing()}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    rate = config.learning_rate
    if config.optimizer == "muon":
        return Muon(muon_groups(model, rate, config.weight_decay), lr=rate, momentum=0.85)
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True, fused=True)


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
        scheduler = run.plan.schedule(optimizer, warmup_share=WARMUP_SHARE[config.optimizer])
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
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
