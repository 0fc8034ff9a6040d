"""The suites on flags of the recipes: how much a flag speeds training up on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.contestants import BATCH_SIZE, recipe_contestant
from benchmarks.harness.materials import image_dataset
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Suite
from benchmarks.suites import bert, mnist, resnet

Settings = dict[str, object]  # fields of a recipe's `Config`
DEFAULT = "default settings"
COMPILE: dict[str, Settings] = {"--compile": {"compile": True}}


def mnist_flags_suite(options: Options) -> Suite:
    """Compile the perceptron, on an epoch of MNIST."""
    settings: Settings = {
        "dataset": image_dataset(options.data, "mnist"),
        "batch_size": load_recipe("mnist_mlp").Config().batch_size,
    }
    updates = options.scaled(117)
    return flag_suite("mnist_mlp", options, updates, mnist.MLP_WARMUP, settings, COMPILE)


def resnet_flags_suite(options: Options) -> Suite:
    """Compile ResNet-18, on CIFAR-10."""
    settings: Settings = {
        "dataset": image_dataset(options.data, "cifar10"),
        "batch_size": BATCH_SIZE,
    }
    updates = options.scaled(200 if options.on_gpu else 4)
    return flag_suite("resnet", options, updates, resnet.RESNET_WARMUP, settings, COMPILE)


def bert_flags_suite(options: Options) -> Suite:
    """Compile BERT, and switch `--padding-free`, on an extract of SST-2."""
    updates = options.scaled(256 if options.on_gpu else 24)
    # The default of --padding-free, "auto", means "yes" on a CPU and "no" elsewhere.
    not_the_default = "yes" if options.on_gpu else "no"
    flags: dict[str, Settings] = {
        f"--padding-free {not_the_default}": {"padding_free": not_the_default},
        **COMPILE,
    }
    settings = bert.recipe_settings(options, updates)
    return flag_suite("bert", options, updates, bert.WARMUP, settings, flags)


def flag_suite(
    recipe: str,
    options: Options,
    updates: int,
    warmup_share: float,
    settings: Settings,
    flags: Mapping[str, Settings],
) -> Suite:
    """Compare a recipe with itself under each flag.

    Args:
        settings: fields of the recipe's `Config`, the same with and without the flags.
        flags: fields that differ from the default settings, by the flag's name.
    """
    contestants = {
        title: recipe_contestant(
            recipe, options, warmup_share, None, **settings, **flags.get(title, {})
        )
        for title in (DEFAULT, *flags)
    }
    return Suite(
        f"flags: {recipe}",
        "samples/s",
        updates=updates,
        workload={
            "data": Path(str(settings["dataset"])).name,
            "batch_size": settings["batch_size"],
            "precision": options.precision,
        },
        contestants=contestants,
        comparisons=[Comparison(f"{recipe}: {flag} / default", flag, DEFAULT) for flag in flags],
        notes=["the time of compiling, as the recipe reports it, is left out"],
        warmup_updates=2,
    )
