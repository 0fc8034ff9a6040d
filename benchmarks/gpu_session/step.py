"""What a step of `benchmarks/gpu.py` does: measure recipes, launch them, and keep its record."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import REPOSITORY
from benchmarks.harness.guarded import without_waiting
from benchmarks.harness.isolation import default_device, isolated
from benchmarks.harness.judging import mfu_at
from benchmarks.harness.kernel_time import KernelTime
from benchmarks.harness.materials import image_dataset, random_bert, text_extract
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.result_file import write_results
from benchmarks.harness.rounds import Comparison, FinishedTraining
from common.errors import UserError
from common.measure import memory
from common.run_directory.record_files import read_record
from common.run_directory.records import RunConfig
from common.system.processor import cpu_threads

PROFILED_UPDATES = 20
# After so many updates, a wait for the device is an error. In the first ones memory is measured.
SETTLED = 5
ERROR_CHARACTERS = 1500  # of the end of a traceback


@dataclass
class MeasuredRecipe:
    """A recipe with some settings, and its measured figures."""

    name: str
    recipe: str
    settings: Mapping[str, object]  # fields of the recipe's `Config`
    compiled: bool = False
    rates: list[float] = field(default_factory=list)  # samples/s of each round
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether the recipe trained whenever it was tried so far."""
        return not {"refused", "failed"} & self.figures.keys()


@dataclass
class Step:
    """A step's options, and the record of its figures so far."""

    file: Path  # for the record
    tiny: bool  # the smallest size, to see that it works
    options: Options  # of the suites
    tokenizer: Path | None  # folder with BERT's tokenizer; None: train one
    record: dict[str, Any] = field(default_factory=lambda: {"figures": {}, "goals": []})

    def write(self) -> None:
        """Write the whole record, so that a kill loses nothing."""
        write_results(self.file, self.record)

    def note(self, name: str, figures: object) -> None:
        """Write figures under a name into the record; they must be valid JSON."""
        self.record["figures"][name] = figures
        self.write()

    def figure(
        self, title: str, value: float, least: float | None = None, most: float | None = None
    ) -> None:
        """Write a figure into the record, with its goal if it has one.

        Args:
            least: the goal, if the figure must be at least that.
            most: the goal, if the figure must be at most that.
        """
        comparison = Comparison(title, "", "", least, most)
        row = {
            "title": title,
            "value": value,
            "goal": comparison.goal,
            "reached": comparison.is_reached(value),
        }
        self.record["goals"].append(row)
        self.write()

    def run(self, name: str, command: Sequence[object], **environment: str) -> float:
        """Run a Python command, and return its seconds; its output goes to this step's log."""
        print(f"--- {name}: {' '.join(map(str, command))}", flush=True)
        began = time.perf_counter()
        words = [sys.executable, *map(str, command)]
        subprocess.run(words, env=os.environ | environment, check=True)
        return time.perf_counter() - began

    def launch(self, name: str, recipe: str, *flags: object) -> tuple[Path, float]:
        """Run a recipe as a user does.

        Returns:
            Its run directory, and the seconds that it took.

        Raises:
            RuntimeError: when it did not use the device that is measured.
        """
        directory = self.file.parent / name
        shutil.rmtree(directory, ignore_errors=True)
        script = REPOSITORY / "recipes" / f"{recipe}.py"
        words = [script, *flags, "--output-dir", directory, "--tracker", "none"]
        seconds = self.run(name, words)
        config = read_record(directory / "config.json", RunConfig)
        require_device(name, config.environment.device_type)
        return directory, seconds

    def data_settings(self, recipe: str) -> dict[str, object]:
        """Return the settings that name a recipe's data: public data if `--data` has them."""
        if recipe == "bert":
            rows = 64 if self.tiny else 20_000
            checkpoint = random_bert("tiny" if self.tiny else "base", self.tokenizer)
            return {"dataset": str(text_extract(self.options.data, rows)), "model": str(checkpoint)}
        public_name = {"mnist_mlp": "mnist", "resnet": "cifar10"}[recipe]
        dataset = image_dataset(self.options.data, public_name)
        if dataset != "digits":
            return {"dataset": dataset}
        if recipe == "mnist_mlp":
            return {"dataset": "synthetic"}
        return {"dataset": "synthetic", "image_size": 8 if self.tiny else 32}

    def measure(self, recipes: Sequence[MeasuredRecipe], updates: int, rounds: int) -> None:
        """Measure recipes in turns: A B C, then B C A, and so on.

        First, each recipe trains once while a wait for the device in its loop is an error. Each
        timed training begins with updates that are not timed. On a GPU, the profiler comes last.

        Args:
            updates: timed updates of a training.
        """
        for measured in recipes:
            self.look_for_waits(measured)
            self.note(measured.name, measured.figures)
        for number in range(rounds):
            first = number % len(recipes)
            for measured in [*recipes[first:], *recipes[:first]]:
                if measured.works:
                    self.time_once(measured, updates, seed=number)
                    self.note(measured.name, measured.figures)
        for measured in recipes:
            if measured.works and torch.cuda.is_available():
                self.measure_kernels(measured)
                self.note(measured.name, measured.figures)

    def look_for_waits(self, measured: MeasuredRecipe) -> None:
        """Train some updates while a wait for the device in the loop is an error."""
        # A compiled model may wait while it meets shapes for the first time.
        settled = self.untimed if measured.compiled else SETTLED
        guard = without_waiting(load_recipe(measured.recipe), settled)
        updates = 3 if self.tiny else settled + 10
        self.attempt(measured, lambda: self.train(measured, updates, guard=guard))

    def time_once(self, measured: MeasuredRecipe, updates: int, seed: int) -> None:
        """Time one training, and update the recipe's figures."""
        training = self.attempt(
            measured, lambda: self.train(measured, updates, untimed=self.untimed, seed=seed)
        )
        if training is None:
            return
        measured.rates.append(training.samples / training.seconds)
        rate = statistics.median(measured.rates)
        summary = {
            name: value for name, value in training.summary.items() if not name.startswith("val")
        }
        spread = {
            "least": min(measured.rates),
            "most": max(measured.rates),
            "rounds": len(measured.rates),
        }
        measured.figures |= summary | {"samples_per_second": rate, "spread": spread}
        mfu = mfu_at(rate, training.summary)
        if mfu is not None:
            measured.figures["perf/mfu"] = mfu

    def measure_kernels(self, measured: MeasuredRecipe) -> None:
        """Profile a training to find the share of an update in which a kernel runs."""
        kernels = KernelTime()
        training = self.attempt(
            measured,
            lambda: self.train(measured, PROFILED_UPDATES, untimed=self.untimed, observer=kernels),
        )
        if training is not None:
            # The profiler slows the updates, but not the kernels.
            kernel_seconds_per_sample = kernels.seconds / training.samples
            share = kernel_seconds_per_sample * measured.figures["samples_per_second"]
            measured.figures["kernel_share"] = min(1.0, share)

    @property
    def untimed(self) -> int:
        """Updates of a training before its clock starts."""
        return 1 if self.tiny else self.options.untimed

    def train(
        self,
        measured: MeasuredRecipe,
        updates: int,
        *,
        untimed: int = 0,
        guard: AbstractContextManager[object] | None = None,
        observer: AbstractContextManager[object] | None = None,
        seed: int = 0,
    ) -> FinishedTraining:
        """Train a recipe in this process; see `train_recipe`.

        Args:
            guard: entered around the whole training.
            observer: entered and left with the clock.
        """
        memory.EARLIER_PEAKS.clear()
        if torch.cuda.is_available():
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()
        if measured.compiled:  # code compiled for other precisions would count against a limit
            torch.compiler.reset()
        settings = {
            **measured.settings,
            "compile": measured.compiled,
            "log_every": max(2, updates // 3),
        }
        total = untimed + updates
        with isolated(cpu_threads()), guard or nullcontext():
            training = train_recipe(
                load_recipe(measured.recipe), total, untimed, observer, seed=seed, **settings
            )
        if training.model is not None:
            parameter = next(training.model.parameters())
            require_device(measured.name, parameter.device.type)
        return training

    def attempt(
        self, measured: MeasuredRecipe, train: Callable[[], FinishedTraining]
    ) -> FinishedTraining | None:
        """Return a training. If it fails, put the reason into the figures, and return None."""
        try:
            return train()
        except UserError as refusal:
            measured.figures["refused"] = refusal.message
        except Exception as problem:
            key = "waits" if "synchroniz" in str(problem) else "failed"
            measured.figures[key] = end_of_traceback(problem)
        return None


def require_device(name: str, device_type: str) -> None:
    """Raise a RuntimeError unless a run used the device that is measured."""
    expected = default_device().type
    if device_type != expected:
        raise RuntimeError(f"{name} ran on {device_type}, not on {expected}")


def end_of_traceback(problem: Exception) -> str:
    """Return the end of an error's traceback, with its message."""
    return "".join(traceback.format_exception(problem))[-ERROR_CHARACTERS:]
