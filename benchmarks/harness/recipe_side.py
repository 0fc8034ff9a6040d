"""Runs a recipe's own `main`, and times its loop from outside.

The recipe is imported from `recipes/` and its `main(config)` is called, unchanged. Two names of
its module are replaced while it runs:

- `Run` by a subclass that reads the benchmark's clock when the loop asks for its first batch and
  when the loop is over, and says that neither an evaluation nor a checkpoint is due. So the time
  is that of the loop itself, with the data, clipping, logging and tracking, and without
  evaluating and saving, which the peers don't do either;
- `evaluate` by a function that keeps the model, to be judged by the same code as the peers'.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.harness.isolation import synchronize
from benchmarks.harness.rounds import Training
from common.models.compile import compile_seconds

REPOSITORY = Path(__file__).resolve().parents[2]


def load_recipe(name: str) -> ModuleType:
    """Import `recipes/NAME.py`, which is no package, once."""
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


def train_recipe(
    recipe: ModuleType,
    steps: int,
    skipped: int = 0,
    observer: AbstractContextManager[Any] | None = None,
    **settings: Any,
) -> Training:
    """Run `main` of a recipe for `steps` updates; the time has no compilation in it.

    Args:
        skipped: micro-batches before the clock starts; the samples are those after them.
        observer: entered and left with the clock.
        settings: fields of the recipe's `Config`; the others keep their defaults.
    """
    times: list[float] = []
    compiling: list[float] = []  # seconds spent compiling so far, at each of the times
    models: list[nn.Module] = []

    class TimedRun(recipe.Run):  # type: ignore[misc, name-defined]
        should_evaluate = False
        should_save = False

        def batches(self, loader: Any) -> Iterator[dict[str, torch.Tensor]]:
            batches = super().batches(loader)
            yield from islice(batches, skipped)
            synchronize()
            with observer or nullcontext():
                compiling.append(compile_seconds())
                times.append(time.perf_counter())
                yield from batches
                synchronize()
                times.append(time.perf_counter())
                compiling.append(compile_seconds())

    def evaluate(run: Any, model: nn.Module, loader: Any) -> dict[str, float]:
        models.append(run.accelerator.unwrap_model(model))
        return {"loss": 0.0, "accuracy": 0.0, "count": 1}

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        output = Path(folder, "run")
        limits = {"epochs": 10**6, "max_steps": steps, "output_dir": str(output)}
        config = recipe.Config(**{"tracker": "none", **limits, **settings})
        stack.enter_context(patch.object(recipe, "Run", TimedRun))
        stack.enter_context(patch.object(recipe, "evaluate", evaluate))
        # A process group belongs to the benchmark, and serves the next round too.
        stack.enter_context(patch("torch.distributed.destroy_process_group"))
        recipe.main(config)
        seconds = times[1] - times[0] - (compiling[1] - compiling[0])
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        micro_batches = steps * config.gradient_accumulation_steps - skipped
        samples = micro_batches * config.batch_size * world_size
        metrics = output / "metrics.jsonl"
        loss = mean_training_loss(metrics) if metrics.exists() else float("nan")
        file = output / "summary.json"  # of the first rank
        summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return Training(seconds, samples, loss, models[-1], summary)


def mean_training_loss(path: Path) -> float:
    """Return the mean training loss of a whole run, from its `metrics.jsonl`."""
    total, logged = 0.0, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if "train/loss" in values:
            step = values["progress/global_step"]
            total += values["train/loss"] * (step - logged)
            logged = step
    return total / logged
