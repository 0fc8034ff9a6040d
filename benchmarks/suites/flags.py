"""The suites on flags of the recipes: whether one that is meant to pay does so on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.contestants import BATCH_SIZE, recipe_contestant
from benchmarks.harness.materials import image_dataset
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Suite
from benchmarks.suites import bert, mnist, resnet

DEFAULT = "default settings"


def mnist_flags(options: Options) -> Suite:
    """The perceptron compiled, on an epoch of MNIST."""
    task = {"dataset": image_dataset(options.data, "mnist")}
    task["batch_size"] = load_recipe("mnist_mlp").Config().batch_size
    flags = {"--compile": {"compile": True}}
    return flag_suite("mnist_mlp", options, options.scaled(117), mnist.MLP_WARMUP, task, flags)


def resnet_flags(options: Options) -> Suite:
    """ResNet-18 compiled, on CIFAR-10."""
    task = {"dataset": image_dataset(options.data, "cifar10"), "batch_size": BATCH_SIZE}
    steps = options.scaled(200 if options.on_gpu else 4)
    flags = {"--compile": {"compile": True}}
    return flag_suite("resnet", options, steps, resnet.RESNET_WARMUP, task, flags)


def bert_flags(options: Options) -> Suite:
    """BERT compiled, and with its padding kept or left out, on an extract of SST-2."""
    steps = options.scaled(256 if options.on_gpu else 24)
    # It is off by default on a GPU, and on elsewhere.
    other = "yes" if options.on_gpu else "no"
    flags: dict[str, dict[str, Any]] = {
        f"--padding-free {other}": {"padding_free": other},
        "--compile": {"compile": True},
    }
    task = bert.recipe_task(options, steps)
    return flag_suite("bert", options, steps, bert.WARMUP, task, flags)


def flag_suite(
    recipe: str,
    options: Options,
    steps: int,
    warmup_share: float,
    task: dict[str, Any],
    flags: dict[str, dict[str, Any]],
) -> Suite:
    """Compare a recipe with itself under each of `flags`, which are fields of its `Config`."""
    contestants = {
        title: recipe_contestant(
            recipe, options, warmup_share, None, **task, **flags.get(title, {})
        )
        for title in (DEFAULT, *flags)
    }
    return Suite(
        f"flags: {recipe}",
        "samples/s",
        steps=steps,
        workload={
            "data": Path(task["dataset"]).name,
            "batch_size": task["batch_size"],
            "precision": options.precision,
        },
        contestants=contestants,
        comparisons=[Comparison(f"{recipe}: {flag} / default", flag, DEFAULT) for flag in flags],
        notes=["the time that compiling took, as the recipe reports it, is left out"],
        warmup_steps=2,
    )
