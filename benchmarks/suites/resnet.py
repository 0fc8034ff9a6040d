"""The suites on the ResNet recipe: CIFAR-10, digits, and random images of 224 pixels."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import torch
from torch import nn

from benchmarks.harness import roofs
from benchmarks.harness.contestants import (
    BATCH_SIZE,
    contestant,
    decoded_folder,
    held_out,
    read_images,
    recipe_contestant,
    roof,
)
from benchmarks.harness.judging import Judge
from benchmarks.harness.materials import image_dataset
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Suite, Training
from benchmarks.peer_loops.textbook import (
    ImageArrays,
    Task,
    TransformedImages,
    train_accelerate,
    train_pytorch,
)
from common.data.images import ImageData

RESNET_WARMUP = 0.2  # share of the updates, as in the recipe's `main`


def resnet_task(data: ImageData, model_name: str = "resnet18") -> Task:
    """Return the textbook's task of the ResNet recipe: torch's default memory layout."""
    recipe = load_recipe("resnet")
    config = recipe.Config(model=model_name)

    def build() -> nn.Module:
        return recipe.build_model(config, data)[0].to(memory_format=torch.contiguous_format)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(),
            lr=config.learning_rate,
            momentum=0.9,
            nesterov=True,
            weight_decay=config.weight_decay,
        )

    arrays = ImageArrays.read(decoded_folder(data))
    dataset = TransformedImages(arrays, data.image_size // 8, flip=data.channels == 3)
    return Task(build, optimizer, dataset, BATCH_SIZE, RESNET_WARMUP, config.label_smoothing)


def resnet(options: Options) -> Suite:
    """The ResNet-18 recipe on CIFAR-10 against textbook loops, and its own convolutions."""
    chosen, dataset = options.precision, image_dataset(options.data, "cifar10")
    data = read_images(dataset)
    task = resnet_task(data)
    shape = (BATCH_SIZE, data.channels, data.image_size, data.image_size)
    convolutions = {
        precision: roofs.convolution_products(
            task.build_model(), shape, roofs.DTYPES[precision], torch.channels_last
        )
        for precision in ("fp32", chosen)
    }
    # Once is enough: no contestant is compared with it.
    fp32_roof = BATCH_SIZE / roofs.seconds_per_call(convolutions["fp32"])

    contestants = {
        "recipe": recipe_contestant("resnet", options, RESNET_WARMUP, None, dataset=dataset),
        "Accelerate fp32": contestant(lambda *turn: train_accelerate(task, "fp32", *turn)),
        f"Accelerate {chosen}": contestant(lambda *turn: train_accelerate(task, chosen, *turn)),
        f"PyTorch {chosen}": contestant(lambda *turn: train_pytorch(task, chosen, *turn)),
        f"convolutions {chosen}": roof(convolutions[chosen], BATCH_SIZE),
    }
    goals = (2.5, 1.2, 0.85) if options.has_goals and not options.on_gpu else (None, None, None)
    comparisons = [
        *(
            Comparison(f"ResNet-18: recipe / {peer}", "recipe", peer, goal)
            for peer, goal in {
                "Accelerate fp32": goals[0],
                f"Accelerate {chosen}": goals[1],
            }.items()
        ),
        Comparison(f"recipe / PyTorch {chosen}", "recipe", f"PyTorch {chosen}"),
        Comparison("recipe / its own convolutions", "recipe", f"convolutions {chosen}", goals[2]),
    ]
    return Suite(
        "resnet",
        "samples/s",
        steps=options.scaled(200 if options.on_gpu else 4),
        untimed_steps=options.untimed,
        workload={
            "data": data.source.name,
            "model": "resnet18",
            "image_size": data.image_size,
            "batch_size": BATCH_SIZE,
            "recipe": f"default settings ({chosen})",
            "convolutions fp32, samples/s": round(fp32_roof, 1),
        },
        contestants=contestants,
        comparisons=comparisons,
        quoted={}
        if options.on_gpu or data.source.name != "cifar10"
        else {"Accelerate fp32": 45, "Accelerate bf16": 95},
        notes=[
            "the textbook loops don't clip gradients, and the recipe does",
            "accuracies after the same number of samples: suite quality",
        ],
        warmup_steps=1,
    )


def resnet_quality(options: Options) -> Suite:
    """ResNet-18 for eight epochs of the digits, to compare accuracies."""
    chosen, data = options.precision, read_images("digits")
    task = resnet_task(data)
    judge = Judge(load_recipe("resnet"), held_out(data), chosen, limit=10_000)
    title = f"Accelerate {chosen}"
    contestants = {
        "recipe": recipe_contestant("resnet", options, RESNET_WARMUP, judge, dataset="digits"),
        title: contestant(lambda *turn: train_accelerate(task, chosen, *turn), judge),
    }
    epoch = len(data.splits["train"]) // BATCH_SIZE
    return Suite(
        "quality: resnet",
        "samples/s",
        steps=options.scaled(8 * epoch),
        workload={"data": "digits", "model": "resnet18", "batch_size": BATCH_SIZE},
        contestants=contestants,
        comparisons=[Comparison(f"recipe / {title}", "recipe", title)],
        warmup_steps=1,
    )


def resnet50(options: Options, image_size: int = 224, batch_size: int = BATCH_SIZE) -> Suite:
    """ResNet-50 on random images in each precision, and against timm's, for GPUs."""
    chosen = options.precision
    recipe_module = load_recipe("resnet")
    data = read_images("synthetic", image_size)

    def train_timm(steps: int, seed: int, untimed: int) -> Training:
        """Train as timm's `benchmark.py --bench train --amp --channels-last` does."""
        from benchmarks.peer_loops.timm_resnet50 import train_timm_resnet50

        return train_timm_resnet50(
            steps,
            seed,
            untimed,
            batch_size=batch_size,
            precision=chosen,
            classes=len(data.class_names),
            image_size=image_size,
        )

    convolutions = roofs.convolution_products(
        recipe_module.build_model(recipe_module.Config(model="resnet50"), data)[0],
        (batch_size, 3, image_size, image_size),
        roofs.DTYPES[chosen],
        torch.channels_last,
    )
    settings: dict[str, Any] = {"dataset": "synthetic", "model": "resnet50"}
    settings |= {"image_size": image_size, "batch_size": batch_size}
    offered = get_args(get_type_hints(recipe_module.Config)["mixed_precision"])
    others = [one for one in ("no", "tf32") if one in offered and options.on_gpu]
    contestants = {
        "recipe": recipe_contestant("resnet", options, RESNET_WARMUP, None, **settings),
        f"convolutions {chosen}": roof(convolutions, batch_size),
    }
    comparisons = [Comparison("recipe / its own convolutions", "recipe", f"convolutions {chosen}")]
    for precision in others:
        title = f"recipe {precision.replace('no', 'fp32')}"
        contestants[title] = recipe_contestant(
            "resnet", options, RESNET_WARMUP, None, mixed_precision=precision, **settings
        )
        goal = {"no": 4.0, "tf32": 2.6}[precision]
        comparisons.append(Comparison(f"ResNet-50: recipe / {title}", "recipe", title, goal))
    try:
        import timm  # noqa: F401, which needs torchvision

        missing = ""
    except ImportError as problem:
        missing = f"timm missing: {problem}"
    if not missing:
        contestants["timm AMP channels-last"] = contestant(train_timm)
        comparisons.append(
            Comparison("ResNet-50: recipe / timm", "recipe", "timm AMP channels-last", 1.1)
        )
    return Suite(
        "resnet50",
        "samples/s",
        steps=options.scaled(60),
        untimed_steps=options.untimed,
        workload={"data": "synthetic", "image_size": image_size, "batch_size": batch_size},
        contestants=contestants,
        comparisons=comparisons,
        notes=[
            missing
            or "timm trains on one batch that lies on the GPU; the recipe draws from 4,096 images",
            *([] if "tf32" in offered else ["no tf32: the recipes do not offer it"]),
        ],
        warmup_steps=options.scaled(10),
    )
