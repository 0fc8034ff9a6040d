"""The suites on the MNIST recipe: whole epochs, and the loop of 1 ms steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks import roofs
from benchmarks.bare_loops import BareLoop
from benchmarks.contestants import (
    BATCH_SIZE,
    contestant,
    decoded_folder,
    held_out,
    read_images,
    recipe_contestant,
    roof,
    threads,
)
from benchmarks.isolation import default_device, isolated
from benchmarks.judging import Judge
from benchmarks.materials import image_dataset
from benchmarks.options import Options
from benchmarks.recipe_side import load_recipe
from benchmarks.rounds import Comparison, Contestant, Suite
from benchmarks.textbook import (
    ImageArrays,
    Task,
    TransformedImages,
    ready_tensors,
    train_accelerate,
    train_fabric,
    train_pytorch,
)
from common.data.images import ImageData
from common.data.loader import Loader
from common.data.order import TrainingOrder

MLP_WARMUP = 0.1  # share of the updates, as in the recipe's `main`
# Widths of a two-layer perceptron to choose from, so that a bare step takes about 1 ms.
LOOP_WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
LOOP_STEP_SECONDS = 1e-3


def mlp_builder(data: ImageData, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds the recipe's multilayer perceptron."""
    recipe = load_recipe("mnist_mlp")
    return lambda: recipe.build_model(recipe.Config(**settings), data)[0]


def adamw(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that builds AdamW at the MNIST recipe's learning rate and decay."""
    config = load_recipe("mnist_mlp").Config()
    settings |= {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    return lambda model: torch.optim.AdamW(model.parameters(), **settings)


def mnist(options: Options) -> Suite:
    """The MNIST recipe at its default settings against textbook loops, an epoch a round."""
    batch_size = load_recipe("mnist_mlp").Config().batch_size
    goals: dict[str, float | None] = {"fp32": 4.0, options.precision: 2.3}
    if options.on_gpu:
        goals = {"fp32": None, options.precision: 5.0}
    if not options.has_goals:
        goals = {}
    return mnist_suite("mnist", options, batch_size, goals, None)


def mnist_128(options: Options) -> Suite:
    """The same in batches of 128, which the textbooks take, and against its matrix products."""
    goal = 0.70 if options.has_goals and not options.on_gpu else None
    return mnist_suite("mnist_128", options, BATCH_SIZE, {}, goal)


def mnist_suite(
    name: str,
    options: Options,
    batch_size: int,
    goals: dict[str, float | None],
    goal_of_products: float | None,
) -> Suite:
    """Compare the MNIST recipe with loops that take the same batches.

    Args:
        goals: of the ratios to the textbook loop on Accelerate, by precision.
    """
    chosen, dataset = options.precision, image_dataset(options.data, "mnist")
    data = read_images(dataset)
    epoch = len(data.splits["train"]) // batch_size
    judge = Judge(load_recipe("mnist_mlp"), held_out(data), chosen, limit=10_000)
    arrays = ImageArrays.read(decoded_folder(data))
    config = load_recipe("mnist_mlp").Config()
    task = Task(
        mlp_builder(data),
        adamw(),
        TransformedImages(arrays, crop_padding=0, flip=False),
        batch_size,
        MLP_WARMUP,
    )
    ready = replace(task, dataset=ready_tensors(arrays))
    sizes = [data.channels * data.image_size**2, *config.hidden_sizes, len(data.class_names)]
    products = {
        precision: roofs.linear_products(sizes, batch_size, roofs.DTYPES[precision])
        for precision in ("fp32", chosen)
    }
    # The peers do not shift images.
    settings = {"dataset": dataset, "batch_size": batch_size, "max_shift": 0}
    split = data.splits["train"]
    split.dtype = roofs.DTYPES[chosen]
    split.place(default_device())
    batch = split.gather(torch.arange(batch_size), None)
    fused = replace(task, build_optimizer=adamw(fused=True))
    bare = BareLoop(fused, lambda seed: itertools.repeat(batch), chosen, same_work=False)

    def recipe(**others: Any) -> Contestant:
        return recipe_contestant("mnist_mlp", options, MLP_WARMUP, judge, **settings, **others)

    contestants = {
        "recipe": recipe(),
        "Accelerate fp32": contestant(lambda *turn: train_accelerate(task, "fp32", *turn), judge),
        f"Accelerate {chosen}": contestant(
            lambda *turn: train_accelerate(task, chosen, *turn), judge
        ),
        "PyTorch fp32": contestant(lambda *turn: train_pytorch(task, "fp32", *turn), judge),
        f"PyTorch {chosen}": contestant(lambda *turn: train_pytorch(task, chosen, *turn), judge),
        f"Accelerate, TensorDataset, {chosen}": contestant(
            lambda *turn: train_accelerate(ready, chosen, *turn), judge
        ),
        f"Lightning Fabric {chosen}": contestant(
            lambda *turn: train_fabric(task, chosen, *turn), judge
        ),
        f"PyTorch, one ready batch, {chosen}": contestant(bare.without_accelerate),
        "recipe fp32": recipe(mixed_precision="no"),
        f"matrix products {chosen}": roof(products[chosen], batch_size),
        "matrix products fp32": roof(products["fp32"], batch_size),
    }
    peers = [one for one in contestants if not one.startswith(("recipe", "matrix"))]
    comparisons = [
        Comparison(
            f"MNIST MLP, batch {batch_size}: recipe / {peer}",
            "recipe",
            peer,
            goals.get(peer.removeprefix("Accelerate ")),
        )
        for peer in peers
    ]
    comparisons += [
        Comparison("recipe fp32 / Accelerate fp32", "recipe fp32", "Accelerate fp32"),
        Comparison(
            "recipe / its own matrix products",
            "recipe",
            f"matrix products {chosen}",
            goal_of_products,
        ),
        Comparison("recipe fp32 / its own products", "recipe fp32", "matrix products fp32"),
    ]
    known = not options.on_gpu and data.source.name == "mnist" and batch_size == BATCH_SIZE
    return Suite(
        name,
        "samples/s",
        steps=options.scaled(epoch),
        untimed_steps=options.untimed,
        workload={
            "data": data.source.name,
            "layers": sizes,
            "batch_size": batch_size,
            "recipe": f"default settings ({chosen})",
        },
        contestants=contestants,
        comparisons=comparisons,
        notes=[
            "the textbook loops don't clip gradients, and the recipe does",
            "one ready batch: forward, backward and fused AdamW on the same tensors each time, "
            "which is all that PyTorch can do here without a compiler",
        ],
        quoted={"Accelerate fp32": 19_900, "Accelerate bf16": 34_300} if known else {},
        warmup_steps=options.scaled(50),
    )


def loop(options: Options) -> Suite:
    """The MNIST recipe's loop, logging on, against bare loops of 1 ms steps."""
    chosen, dataset = options.precision, image_dataset(options.data, "mnist")
    data = read_images(dataset)
    split = data.splits["train"]
    split.dtype = roofs.DTYPES[chosen]
    kept: dict[int, list[dict[str, torch.Tensor]]] = {}

    def epochs(seed: int) -> Iterator[dict[str, torch.Tensor]]:
        order = TrainingOrder(
            num_samples=len(split),
            batch_size=BATCH_SIZE,
            accumulation=1,
            world_size=1,
            rank=0,
            seed=seed,
        )
        loader = Loader(split, order, default_device(), "device")
        for epoch in itertools.count():
            for batch, *_ in loader.epoch(epoch):
                yield batch

    def ready(seed: int) -> Iterator[dict[str, torch.Tensor]]:
        if not kept:
            kept[0] = list(itertools.islice(epochs(0), len(split) // BATCH_SIZE))
        return itertools.cycle(kept[0])

    def bare(width: int, batches: Any, same_work: bool) -> BareLoop:
        task = Task(
            mlp_builder(data, hidden_sizes=(width, width)),
            adamw(fused=True),
            split,  # type: ignore[arg-type]
            BATCH_SIZE,
            MLP_WARMUP,
        )
        return BareLoop(task, batches, chosen, same_work)

    def recipe(width: int, tracker: str) -> Contestant:
        return recipe_contestant(
            "mnist_mlp",
            options,
            MLP_WARMUP,
            None,
            dataset=dataset,
            max_shift=0,  # as in the bare loops
            hidden_sizes=(width, width),
            tracker=tracker,
        )

    times: dict[int, float] = {}
    for width in LOOP_WIDTHS:
        candidate = bare(width, ready, False)
        for steps in (20, 100):
            with isolated(threads()):
                times[width] = candidate.with_accelerate(steps, 0).seconds / steps
    width = min(times, key=lambda one: abs(times[one] - LOOP_STEP_SECONDS))
    contestants = {
        "recipe": recipe(width, options.tracker),
        "recipe, W&B offline": recipe(width, "wandb"),
        "bare Accelerate": contestant(bare(width, epochs, False).with_accelerate),
        "bare Accelerate, clip and schedule": contestant(bare(width, epochs, True).with_accelerate),
        "bare Accelerate, ready batches": contestant(bare(width, ready, False).with_accelerate),
        "bare PyTorch": contestant(bare(width, epochs, False).without_accelerate),
        "bare PyTorch, clip and schedule": contestant(bare(width, epochs, True).without_accelerate),
        "bare PyTorch, ready batches": contestant(bare(width, ready, False).without_accelerate),
    }
    comparisons = [
        Comparison(
            f"time of the recipe's loop / {name}",
            "recipe",
            name,
            at_most=1.03 if name == "bare Accelerate" else None,
            inverted=True,
        )
        for name in contestants
        if name.startswith("bare")
    ]
    tracked = Comparison(
        "time of the recipe's loop with W&B offline / bare Accelerate",
        "recipe, W&B offline",
        "bare Accelerate",
        inverted=True,
    )
    return Suite(
        "loop",
        "samples/s",
        steps=options.scaled(700),
        untimed_steps=options.untimed,
        workload={
            "data": data.source.name,
            "hidden_sizes": [width, width],
            "batch_size": BATCH_SIZE,
            "step_milliseconds": {str(key): 1000 * value for key, value in times.items()},
            "tracker": options.tracker,
        },
        contestants=contestants,
        comparisons=[*comparisons, tracked],
        notes=[
            "bare loops take their batches from the recipe's own loader, from the same tensors; "
            "ready batches lie on the device normalised, which leaves nothing to do for data",
            "the width is the one whose bare Accelerate step is nearest to 1 ms",
        ],
        warmup_steps=options.scaled(100),
        rounds_for_one=3,
    )
