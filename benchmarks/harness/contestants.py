"""Makes contestants of training loops, recipes and roofs, and reads the images to train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import roofs
from benchmarks.harness.isolation import isolated
from benchmarks.harness.judging import Judge, throughput
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.rounds import Contestant, FinishedTraining, Measurement, Round
from common.data.images import CachedImages, ImageData, load_images
from common.data.sources import find_named
from common.system.processor import cpu_threads

BATCH_SIZE = 128  # of the image suites

# From a number of timed updates, a seed, and a number of updates before the clock starts.
Train = Callable[[int, int, int], FinishedTraining]


def contestant(train: Train, judge: Judge | None = None) -> Contestant:
    """Make a contestant whose figure is samples/s of a training loop."""

    def compete(turn: Round) -> Measurement:
        with isolated(cpu_threads()):
            training = train(turn.updates, turn.seed, turn.untimed)
        return throughput(training, judge, turn)

    return compete


def roof(work: Callable[[], object], batch_size: int) -> Contestant:
    """Make a contestant that does `work` once per update, and nothing else."""

    def compete(turn: Round) -> Measurement:
        with isolated(cpu_threads()):
            roofs.seconds_of(work, turn.untimed)
            seconds = roofs.seconds_of(work, turn.updates)
        return Measurement(turn.updates * batch_size / seconds)

    return compete


def recipe_contestant(
    name: str, options: Options, warmup_share: float, judge: Judge | None, **settings: object
) -> Contestant:
    """Make a contestant of a recipe's own `main`.

    Args:
        warmup_share: share of the updates with a rising learning rate, the same as the peers'.
        judge: evaluates the trained model; None: the model is not evaluated.
        settings: fields of the recipe's `Config`.
    """
    recipe = load_recipe(name)
    settings = {"batch_size": BATCH_SIZE, "tracker": options.tracker, **settings}
    accumulation = settings.get("gradient_accumulation_steps", 1)
    assert isinstance(accumulation, int)

    def train(updates: int, seed: int, untimed: int) -> FinishedTraining:
        warmup = int(warmup_share * (untimed + updates))
        skipped = untimed * accumulation
        return train_recipe(
            recipe,
            untimed + updates,
            skipped,
            observer=None,
            seed=seed,
            warmup_steps=warmup,
            **settings,
        )

    return contestant(train, judge)


def read_images(dataset: str, image_size: int | None = None) -> ImageData:
    """Read an image data set as the recipes do, and decode it the first time."""
    return load_images(
        find_named(dataset, None),
        image_size=image_size,
        image_column=None,
        label_column=None,
        dtype=torch.float32,
    )


def cached_split(data: ImageData, name: str) -> CachedImages:
    """Return a split of images that are not streamed."""
    split = data.splits[name]
    assert isinstance(split, CachedImages)
    return split


def decoded_folder(data: ImageData) -> Path:
    """Return the folder of a data set's decoded arrays."""
    images = cached_split(data, "train").arrays["images"]
    assert isinstance(images, np.memmap)
    return Path(str(images.filename)).parent


def held_out(data: ImageData) -> CachedImages:
    """Return the split on which models are judged."""
    return cached_split(data, "test" if "test" in data.splits else "validation")
