"""The suites on the MNIST recipe: whole epochs, and a loop of about 1 ms a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

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
from benchmarks.harness.isolation import default_device, isolated
from benchmarks.harness.judging import Judge
from benchmarks.harness.materials import image_dataset
from benchmarks.harness.options import Options
from benchmarks.harness.precisions import DTYPES
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Contestant, Suite
from benchmarks.peer_loops.bare import BareLoop, Batch, BatchMaker
from benchmarks.peer_loops.textbook import (
    ImageArrays,
    Task,
    TextbookLoop,
    TransformedImages,
    ready_tensors,
    train_accelerate,
    train_fabric,
    train_pytorch,
)
from common.data.images import ImageData
from common.data.loader import Loader
from common.data.order import TrainingOrder
from common.system.processor import cpu_threads

LEARNING_RATE = 1e-3  # of the recipe and its peers
MLP_WARMUP = 0.1  # share of the updates, as in the recipe's `main`
# Widths of a two-layer perceptron; the suite takes the one whose bare step is nearest to 1 ms.
LOOP_WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
LOOP_STEP_SECONDS = 1e-3


def mlp_builder(data: ImageData, **settings: object) -> Callable[[], nn.Module]:
    """Return a function that builds the recipe's multilayer perceptron."""
    recipe = load_recipe("mnist_mlp")
    return lambda: recipe.build_model(recipe.Config(**settings), data)[0]


def adamw(fused: bool | None = None) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that builds AdamW at `LEARNING_RATE`, with the MNIST recipe's decay."""
    config = load_recipe("mnist_mlp").Config()
    return lambda model: torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        weight_decay=config.weight_decay,
        fused=fused,
    )


def mnist_suite(options: Options) -> Suite:
    """Compare the MNIST recipe at its default settings with textbook loops, an epoch per round."""
    batch_size = load_recipe("mnist_mlp").Config().batch_size
    goals: dict[str, float | None] = {"fp32": 4.0, options.precision: 2.3}
    if options.on_gpu:
        goals = {"fp32": None, options.precision: 5.0}
    if not options.has_goals:
        goals = {}
    return suite_in_batches("mnist", options, batch_size, goals, None)


def mnist_128_suite(options: Options) -> Suite:
    """Compare in batches of 128, which textbooks use, and with the model's matrix products."""
    goal = 0.70 if options.has_goals and not options.on_gpu else None
    return suite_in_batches("mnist_128", options, BATCH_SIZE, {}, goal)


def suite_in_batches(
    name: str,
    options: Options,
    batch_size: int,
    goals: dict[str, float | None],
    goal_of_products: float | None,
) -> Suite:
    """Compare the MNIST recipe with loops that take the same batches.

    Args:
        goals: for the ratios to the textbook loop on Accelerate, by precision.
        goal_of_products: for the ratio to the model's matrix products.
    """
    precision = options.precision
    dataset = image_dataset(options.data, "mnist")
    data = read_images(dataset)
    sizes = layer_sizes(data)
    contestants = mnist_contestants(options, dataset, data, batch_size)
    is_quoted = not options.on_gpu and data.source.name == "mnist" and batch_size == BATCH_SIZE
    return Suite(
        name,
        "samples/s",
        updates=options.scaled(len(data.splits["train"]) // batch_size),
        untimed_updates=options.untimed,
        workload={
            "data": data.source.name,
            "layers": sizes,
            "batch_size": batch_size,
            "recipe": f"default settings ({precision})",
        },
        contestants=contestants,
        comparisons=mnist_comparisons(contestants, batch_size, precision, goals, goal_of_products),
        notes=[
            "the textbook loops don't clip gradients, and the recipe does",
            "one ready batch: forward, backward and fused AdamW on the same tensors each time, "
            "which is all that PyTorch can do here without a compiler",
        ],
        quoted={"Accelerate fp32": 19_900, "Accelerate bf16": 34_300} if is_quoted else {},
        warmup_updates=options.scaled(50),
    )


def layer_sizes(data: ImageData) -> list[int]:
    """Return the features of the recipe's input and of each of its layers' outputs."""
    config = load_recipe("mnist_mlp").Config()
    features = data.channels * data.image_size**2
    return [features, *config.hidden_sizes, len(data.class_names)]


def mnist_contestants(
    options: Options, dataset: str, data: ImageData, batch_size: int
) -> dict[str, Contestant]:
    """Return the recipe, the textbook loops, a loop over one ready batch, and matrix products."""
    precision = options.precision
    judge = Judge(load_recipe("mnist_mlp"), held_out(data), precision, limit=10_000)
    arrays = ImageArrays.read(decoded_folder(data))
    images = TransformedImages(arrays, crop_padding=0, flip=False)
    task = Task(mlp_builder(data), adamw(), images, batch_size, MLP_WARMUP)
    ready_task = replace(task, dataset=ready_tensors(arrays))
    products = {
        name: roofs.linear_products(layer_sizes(data), batch_size, DTYPES[name])
        for name in ("fp32", precision)
    }

    def recipe(**settings: object) -> Contestant:
        return recipe_contestant(
            "mnist_mlp",
            options,
            MLP_WARMUP,
            judge,
            dataset=dataset,
            batch_size=batch_size,
            max_shift=0,  # the peers do not shift images
            learning_rate=LEARNING_RATE,
            **settings,
        )

    def peer(train: TextbookLoop, precision: str, task: Task = task) -> Contestant:
        return contestant(lambda *turn: train(task, precision, *turn), judge)

    one_batch = one_batch_loop(task, data, batch_size, precision)
    return {
        "recipe": recipe(),
        "Accelerate fp32": peer(train_accelerate, "fp32"),
        f"Accelerate {precision}": peer(train_accelerate, precision),
        "PyTorch fp32": peer(train_pytorch, "fp32"),
        f"PyTorch {precision}": peer(train_pytorch, precision),
        f"Accelerate, TensorDataset, {precision}": peer(train_accelerate, precision, ready_task),
        f"Lightning Fabric {precision}": peer(train_fabric, precision),
        f"PyTorch, one ready batch, {precision}": contestant(one_batch.without_accelerate),
        "recipe fp32": recipe(mixed_precision="no"),
        f"matrix products {precision}": roof(products[precision], batch_size),
        "matrix products fp32": roof(products["fp32"], batch_size),
    }


def one_batch_loop(task: Task, data: ImageData, batch_size: int, precision: str) -> BareLoop:
    """Return a bare loop over the same batch again and again, with a fused optimizer."""
    split = data.splits["train"]
    split.dtype = DTYPES[precision]
    split.place(default_device())
    batch = split.gather(torch.arange(batch_size), None)
    fused_task = replace(task, build_optimizer=adamw(fused=True))
    return BareLoop(fused_task, lambda seed: itertools.repeat(batch), precision, same_work=False)


def mnist_comparisons(
    contestants: Iterable[str],
    batch_size: int,
    precision: str,
    goals: dict[str, float | None],
    goal_of_products: float | None,
) -> list[Comparison]:
    """Return the ratios of the recipe to its peers, and to its matrix products."""
    peers = [name for name in contestants if not name.startswith(("recipe", "matrix"))]
    comparisons = [
        Comparison(
            f"MNIST MLP, batch {batch_size}: recipe / {peer}",
            "recipe",
            peer,
            goals.get(peer.removeprefix("Accelerate ")),
        )
        for peer in peers
    ]
    return [
        *comparisons,
        Comparison("recipe fp32 / Accelerate fp32", "recipe fp32", "Accelerate fp32"),
        Comparison(
            "recipe / its own matrix products",
            "recipe",
            f"matrix products {precision}",
            goal_of_products,
        ),
        Comparison("recipe fp32 / its own products", "recipe fp32", "matrix products fp32"),
    ]


@dataclass
class LoopContestants:
    """Makes the contestants of the suite `loop`, which train MLPs of two equal layers.

    Bare loops take their batches from the recipe's own loader.
    """

    options: Options
    dataset: str
    data: ImageData
    ready_batches: list[Batch] = field(default_factory=list)  # of an epoch, once they are needed

    def made_in_the_loop(self, seed: int) -> Iterator[Batch]:
        """Yield the batches of epoch after epoch; each batch is made when the loop needs it."""
        split = self.data.splits["train"]
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

    def made_before(self, seed: int) -> Iterator[Batch]:
        """Return an endless iterator over the batches of one epoch, which lie on the device."""
        if not self.ready_batches:
            batches = len(self.data.splits["train"]) // BATCH_SIZE
            self.ready_batches = list(itertools.islice(self.made_in_the_loop(0), batches))
        return itertools.cycle(self.ready_batches)

    def bare(self, width: int, make_batches: BatchMaker, same_work: bool) -> BareLoop:
        """Return a bare loop; see `BareLoop`."""
        task = Task(
            mlp_builder(self.data, hidden_sizes=(width, width)),
            adamw(fused=True),
            self.data.splits["train"],  # type: ignore[arg-type]
            BATCH_SIZE,
            MLP_WARMUP,
        )
        return BareLoop(task, make_batches, self.options.precision, same_work)

    def recipe(self, width: int, tracker: str) -> Contestant:
        """Make a contestant of the recipe."""
        return recipe_contestant(
            "mnist_mlp",
            self.options,
            MLP_WARMUP,
            None,
            dataset=self.dataset,
            max_shift=0,  # as in the bare loops
            hidden_sizes=(width, width),
            tracker=tracker,
        )

    def seconds_per_step(self, width: int) -> float:
        """Return the seconds of a bare step on Accelerate, after a short training to warm up."""
        bare_loop = self.bare(width, self.made_before, False)
        for updates in (20, 100):
            with isolated(cpu_threads()):
                seconds = bare_loop.with_accelerate(updates, 0).seconds
        return seconds / updates

    def make_all(self, width: int) -> dict[str, Contestant]:
        """Return all contestants by name."""
        plain = self.bare(width, self.made_in_the_loop, False)
        same_work = self.bare(width, self.made_in_the_loop, True)
        ready = self.bare(width, self.made_before, False)
        return {
            "recipe": self.recipe(width, self.options.tracker),
            "recipe, W&B offline": self.recipe(width, "wandb"),
            "bare Accelerate": contestant(plain.with_accelerate),
            "bare Accelerate, clip and schedule": contestant(same_work.with_accelerate),
            "bare Accelerate, ready batches": contestant(ready.with_accelerate),
            "bare PyTorch": contestant(plain.without_accelerate),
            "bare PyTorch, clip and schedule": contestant(same_work.without_accelerate),
            "bare PyTorch, ready batches": contestant(ready.without_accelerate),
        }


def loop_suite(options: Options) -> Suite:
    """Compare the MNIST recipe's loop, with logging, with bare loops of about 1 ms a step."""
    dataset = image_dataset(options.data, "mnist")
    data = read_images(dataset)
    data.splits["train"].dtype = DTYPES[options.precision]
    maker = LoopContestants(options, dataset, data)
    step_seconds = {width: maker.seconds_per_step(width) for width in LOOP_WIDTHS}
    width = min(step_seconds, key=lambda width: abs(step_seconds[width] - LOOP_STEP_SECONDS))
    contestants = maker.make_all(width)
    return Suite(
        "loop",
        "samples/s",
        updates=options.scaled(700),
        untimed_updates=options.untimed,
        workload={
            "data": data.source.name,
            "hidden_sizes": [width, width],
            "batch_size": BATCH_SIZE,
            "step_milliseconds": {
                str(width): 1000 * seconds for width, seconds in step_seconds.items()
            },
            "tracker": options.tracker,
        },
        contestants=contestants,
        comparisons=loop_comparisons(contestants),
        notes=[
            "bare loops take their batches from the recipe's own loader, from the same tensors; "
            "ready batches lie on the device normalised, which leaves nothing to do for data",
            "the width is the one whose bare Accelerate step is nearest to 1 ms",
        ],
        warmup_updates=options.scaled(100),
        rounds_for_one=3,
    )


def loop_comparisons(contestants: Iterable[str]) -> list[Comparison]:
    """Return the ratios of the recipe's time to that of each bare loop."""
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
    return [*comparisons, tracked]
