"""Runs a recipe's own `main`, and times its loop from outside.

The recipe is imported from `recipes/`, and its `main(config)` is called unchanged. While it runs,
two names of its module are replaced:

- `Run` by a subclass that reads the clock when the loop requests its first batch and when the loop
  is over. In this subclass, no evaluation or checkpoint is ever due. So the time includes data,
  clipping, logging and tracking. It excludes evaluations and saves, which the peers lack, too, and
  the thread that saves a run's provenance (its code and packages) once, in about 0.2 seconds;
- `evaluate` by a function that keeps the model, so that the same code judges it and the peers'.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import nn

from benchmarks import REPOSITORY
from benchmarks.harness.isolation import synchronize
from benchmarks.harness.rounds import FinishedTraining
from common.measure.compile_time import compile_seconds_of_process
from common.run_directory.record_files import read_record_if_there
from common.run_directory.records import Summary
from common.storage.json_files import read_lines

if TYPE_CHECKING:
    from common.run import Run

NO_LIMIT = 10**6  # epochs
Batch = dict[str, torch.Tensor]


def load_recipe(name: str) -> ModuleType:
    """Import `recipes/NAME.py` from its file, once; `recipes` is not a package."""
    module_name = f"recipe_{name}"
    if module_name not in sys.modules:
        path = REPOSITORY / "recipes" / f"{name}.py"
        specification = importlib.util.spec_from_file_location(module_name, path)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[module_name] = module
        specification.loader.exec_module(module)
    return sys.modules[module_name]


@dataclass
class LoopTimer:
    """Times the loop of a run, without its first micro-batches and without compilation."""

    skipped: int  # micro-batches before the clock starts
    observer: AbstractContextManager[object] | None  # entered and left with the clock
    seconds: float | None = None  # None until the loop is over

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the loop's batches; when they are used up, set `seconds`."""
        yield from islice(batches, self.skipped)
        synchronize()
        with self.observer or nullcontext():
            compiled_before = compile_seconds_of_process()
            began = time.perf_counter()
            yield from batches
            synchronize()
            ended = time.perf_counter()
            compiled_after = compile_seconds_of_process()
        self.seconds = ended - began - (compiled_after - compiled_before)


@contextmanager
def timed_by(recipe: ModuleType, timer: LoopTimer, models: list[nn.Module]) -> Iterator[None]:
    """Replace a recipe's `Run` and `evaluate`: the loop is only timed, and the model kept.

    Args:
        models: `evaluate` appends the bare model to this list.
    """

    class TimedRun(recipe.Run):  # type: ignore[misc, name-defined]
        should_evaluate = False
        should_save = False

        def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
            self.context.provenance.wait()
            return timer.timed(super().batches(loader))

    def evaluate(run: Run, model: nn.Module, loader: object) -> dict[str, float]:
        models.append(run.accelerator.unwrap_model(model))
        return {"loss": 0.0, "accuracy": 0.0, "count": 1}

    with (
        patch.object(recipe, "Run", TimedRun),
        patch.object(recipe, "evaluate", evaluate),
        # The process group belongs to the benchmark, and the next round needs it too.
        patch("torch.distributed.destroy_process_group"),
    ):
        yield


def train_recipe(
    recipe: ModuleType,
    updates: int,
    skipped: int = 0,
    observer: AbstractContextManager[object] | None = None,
    **settings: object,
) -> FinishedTraining:
    """Run `main` of a recipe, and time its loop without compilation.

    Args:
        updates: of the whole run.
        skipped: micro-batches before the clock starts; their samples do not count.
        observer: entered and left with the clock.
        settings: fields of the recipe's `Config`; the others keep their defaults.

    Raises:
        RuntimeError: when the recipe leaves its loop early, so that there is no time.
    """
    timer = LoopTimer(skipped, observer)
    models: list[nn.Module] = []

    with tempfile.TemporaryDirectory() as folder, timed_by(recipe, timer, models):
        output = Path(folder, "run")
        limits = {"epochs": NO_LIMIT, "max_steps": updates, "output_dir": str(output)}
        config = recipe.Config(**{"tracker": "none", **limits, **settings})
        recipe.main(config)
        loss = mean_training_loss(output / "metrics.jsonl")
        summary = read_summary(output / "summary.json")
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    micro_batches = updates * config.gradient_accumulation_steps - skipped
    samples = micro_batches * config.batch_size * world_size
    if timer.seconds is None:
        raise RuntimeError("the recipe left its loop before its batches were used up")
    return FinishedTraining(timer.seconds, samples, loss, models[-1], summary)


def read_summary(file: Path) -> dict[str, float]:
    """Return the figures of a run's summary; empty on all ranks but the first, which writes it."""
    summary = read_record_if_there(file, Summary)
    return {} if summary is None else summary.figures


def mean_training_loss(path: Path) -> float:
    """Return the mean training loss of a whole run, from its `metrics.jsonl`; NaN without it."""
    rows = read_lines(path, key="progress/global_step")
    if not rows:
        return math.nan
    total = 0.0
    last_step = 0
    for row in rows:
        if "train/loss" in row:
            step = row["progress/global_step"]
            total += row["train/loss"] * (step - last_step)
            last_step = step
    return total / last_step
