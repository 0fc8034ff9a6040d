"""The suites on the ResNet recipe: CIFAR-10, digits, and random images of 224 pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args, get_type_hints

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
from benchmarks.harness.precisions import DTYPES
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Contestant, FinishedTraining, Suite
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
    """Return the ResNet recipe's task for textbook loops, in torch's default memory layout."""
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


def resnet_suite(options: Options) -> Suite:
    """Compare the ResNet-18 recipe on CIFAR-10 with textbook loops and its own convolutions."""
    precision = options.precision
    dataset = image_dataset(options.data, "cifar10")
    data = read_images(dataset)
    task = resnet_task(data)
    shape = (BATCH_SIZE, data.channels, data.image_size, data.image_size)
    convolutions = {
        name: roofs.convolution_products(
            task.build_model(), shape, DTYPES[name], torch.channels_last
        )
        for name in ("fp32", precision)
    }
    # Measured once, since no contestant is compared with it.
    fp32_roof = BATCH_SIZE / roofs.seconds_per_call(convolutions["fp32"])
    recipe = recipe_contestant("resnet", options, RESNET_WARMUP, None, dataset=dataset)
    contestants = {
        "recipe": recipe,
        **textbook_contestants(task, precision),
        f"convolutions {precision}": roof(convolutions[precision], BATCH_SIZE),
    }
    is_quoted = not options.on_gpu and data.source.name == "cifar10"
    return Suite(
        "resnet",
        "samples/s",
        updates=options.scaled(200 if options.on_gpu else 4),
        untimed_updates=options.untimed,
        workload={
            "data": data.source.name,
            "model": "resnet18",
            "image_size": data.image_size,
            "batch_size": BATCH_SIZE,
            "recipe": f"default settings ({precision})",
            "convolutions fp32, samples/s": round(fp32_roof, 1),
        },
        contestants=contestants,
        comparisons=resnet_comparisons(options),
        quoted={"Accelerate fp32": 45, "Accelerate bf16": 95} if is_quoted else {},
        notes=[
            "the textbook loops don't clip gradients, and the recipe does",
            "accuracies after the same number of samples: suite quality",
        ],
        warmup_updates=1,
    )


def textbook_contestants(task: Task, precision: str) -> dict[str, Contestant]:
    """Return the textbook loops: with Accelerate in two precisions, and in plain PyTorch."""
    return {
        "Accelerate fp32": contestant(lambda *turn: train_accelerate(task, "fp32", *turn)),
        f"Accelerate {precision}": contestant(
            lambda *turn: train_accelerate(task, precision, *turn)
        ),
        f"PyTorch {precision}": contestant(lambda *turn: train_pytorch(task, precision, *turn)),
    }


def resnet_comparisons(options: Options) -> list[Comparison]:
    """Return the ratios of the ResNet-18 recipe to its peers and its convolutions."""
    precision = options.precision
    has_goals = options.has_goals and not options.on_gpu
    same_precision = f"Accelerate {precision}"
    # On a CPU without bf16 the chosen precision is fp32, and both names are the same.
    goals = {"Accelerate fp32": 2.5 if has_goals else None}
    goals[same_precision] = 1.2 if has_goals else None
    comparisons = [
        Comparison(f"ResNet-18: recipe / {peer}", "recipe", peer, goal)
        for peer, goal in goals.items()
    ]
    return [
        *comparisons,
        Comparison(f"recipe / PyTorch {precision}", "recipe", f"PyTorch {precision}"),
        Comparison(
            "recipe / its own convolutions",
            "recipe",
            f"convolutions {precision}",
            0.85 if has_goals else None,
        ),
    ]


def resnet_quality_suite(options: Options) -> Suite:
    """Train ResNet-18 for eight epochs of the digits, to compare accuracies."""
    precision = options.precision
    data = read_images("digits")
    task = resnet_task(data)
    judge = Judge(load_recipe("resnet"), held_out(data), precision, limit=10_000)
    title = f"Accelerate {precision}"
    contestants = {
        "recipe": recipe_contestant("resnet", options, RESNET_WARMUP, judge, dataset="digits"),
        title: contestant(lambda *turn: train_accelerate(task, precision, *turn), judge),
    }
    epoch = len(data.splits["train"]) // BATCH_SIZE
    return Suite(
        "quality: resnet",
        "samples/s",
        updates=options.scaled(8 * epoch),
        workload={"data": "digits", "model": "resnet18", "batch_size": BATCH_SIZE},
        contestants=contestants,
        comparisons=[Comparison(f"recipe / {title}", "recipe", title)],
        warmup_updates=1,
    )


def resnet50_suite(options: Options, image_size: int = 224, batch_size: int = BATCH_SIZE) -> Suite:
    """Compare ResNet-50 on random images with its other precisions and with timm's, for GPUs."""
    precision = options.precision
    data = read_images("synthetic", image_size)
    contestants = {
        "recipe": resnet50_contestant(options, image_size, batch_size),
        f"convolutions {precision}": roof(
            resnet50_convolutions(data, precision, image_size, batch_size), batch_size
        ),
    }
    comparisons = [
        Comparison("recipe / its own convolutions", "recipe", f"convolutions {precision}")
    ]
    offered_precisions = get_args(get_type_hints(load_recipe("resnet").Config)["mixed_precision"])
    for name, goal in {"no": 4.0, "tf32": 2.6}.items():
        if name in offered_precisions and options.on_gpu:
            title = f"recipe {name.replace('no', 'fp32')}"
            contestants[title] = resnet50_contestant(
                options, image_size, batch_size, mixed_precision=name
            )
            comparisons.append(Comparison(f"ResNet-50: recipe / {title}", "recipe", title, goal))
    notes = []
    problem = problem_of_timm()
    if problem is None:
        notes.append(
            "timm trains on one batch that lies on the GPU; the recipe draws from 4,096 images"
        )
        title = "timm AMP channels-last"
        contestants[title] = timm_contestant(precision, data, image_size, batch_size)
        comparisons.append(Comparison("ResNet-50: recipe / timm", "recipe", title, 1.1))
    else:
        notes.append(f"timm missing: {problem}")
    if "tf32" not in offered_precisions:
        notes.append("no tf32: the recipes do not offer it")
    return Suite(
        "resnet50",
        "samples/s",
        updates=options.scaled(60),
        untimed_updates=options.untimed,
        workload={"data": "synthetic", "image_size": image_size, "batch_size": batch_size},
        contestants=contestants,
        comparisons=comparisons,
        notes=notes,
        warmup_updates=options.scaled(10),
    )


def resnet50_contestant(
    options: Options, image_size: int, batch_size: int, **settings: object
) -> Contestant:
    """Make a contestant of the recipe with ResNet-50 on random images."""
    return recipe_contestant(
        "resnet",
        options,
        RESNET_WARMUP,
        None,
        dataset="synthetic",
        model="resnet50",
        image_size=image_size,
        batch_size=batch_size,
        **settings,
    )


def resnet50_convolutions(
    data: ImageData, precision: str, image_size: int, batch_size: int
) -> Callable[[], None]:
    """Return a function that does the convolutions of one step of ResNet-50."""
    recipe = load_recipe("resnet")
    model, _ = recipe.build_model(recipe.Config(model="resnet50"), data)
    shape = (batch_size, 3, image_size, image_size)
    return roofs.convolution_products(model, shape, DTYPES[precision], torch.channels_last)


def problem_of_timm() -> str | None:
    """Return why timm can't be imported; None if it can."""
    try:
        import timm  # noqa: F401, which needs torchvision
    except ImportError as problem:
        return str(problem)
    return None


def timm_contestant(
    precision: str, data: ImageData, image_size: int, batch_size: int
) -> Contestant:
    """Make a contestant that trains as timm's `benchmark.py` does."""

    def train(updates: int, seed: int, untimed: int) -> FinishedTraining:
        from benchmarks.peer_loops.timm_resnet50 import train_timm_resnet50

        return train_timm_resnet50(
            updates,
            seed,
            untimed,
            batch_size=batch_size,
            precision=precision,
            classes=len(data.class_names),
            image_size=image_size,
        )

    return contestant(train)
