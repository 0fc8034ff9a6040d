"""Makes contestants of training loops, recipes and roofs, and reads the images they train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import roofs
from benchmarks.harness.isolation import isolated
from benchmarks.harness.judging import Judge, throughput
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.rounds import Contestant, Measurement, Round, Training
from common.data.images import ImageData, load_images
from common.data.sources import find_named
from common.system.machine import cpu_threads

BATCH_SIZE = 128  # of the image suites

# Of a number of timed updates, a seed, and a number of updates before the clock starts.
Train = Callable[[int, int, int], Training]


def threads() -> int:
    """Return how many threads each process of this job should use, so that all cores are used."""
    return cpu_threads()


def contestant(train: Train, judge: Judge | None = None) -> Contestant:
    """Make a contestant whose figure is samples/s of a training loop."""

    def compete(asked: Round) -> Measurement:
        with isolated(threads()):
            training = train(asked.steps, asked.seed, asked.untimed)
        return throughput(training, judge, asked)

    return compete


def roof(work: Callable[[], object], batch_size: int) -> Contestant:
    """Make a contestant that does `work` once per update, and nothing else."""

    def compete(asked: Round) -> Measurement:
        with isolated(threads()):
            roofs.seconds_of(work, asked.untimed)
            seconds = roofs.seconds_of(work, asked.steps)
        return Measurement(asked.steps * batch_size / seconds)

    return compete


def recipe_contestant(
    name: str, options: Options, warmup_share: float, judge: Judge | None, **settings: Any
) -> Contestant:
    """Make a contestant of a recipe's own `main`; its warm-up is the peers', not the default."""
    recipe = load_recipe(name)
    settings = {"batch_size": BATCH_SIZE, "tracker": options.tracker, **settings}

    def train(steps: int, seed: int, untimed: int) -> Training:
        warmup = int(warmup_share * (untimed + steps))
        skipped = untimed * settings.get("gradient_accumulation_steps", 1)
        return train_recipe(
            recipe, untimed + steps, skipped, seed=seed, warmup_steps=warmup, **settings
        )

    return contestant(train, judge)


def read_images(dataset: str, image_size: int | None = None) -> ImageData:
    """Read an image data set as the recipes do, decoding it if this is the first time."""
    return load_images(
        find_named(dataset, None),
        image_size=image_size,
        image_column=None,
        label_column=None,
        dtype=torch.float32,
    )


def decoded_folder(data: ImageData) -> Path:
    """Return the folder of the decoded arrays of `data`."""
    images = data.splits["train"].arrays["images"]
    assert isinstance(images, np.memmap)
    return Path(str(images.filename)).parent


def held_out(data: ImageData) -> Any:
    """Return the split to judge on."""
    return data.splits["test" if "test" in data.splits else "validation"]
