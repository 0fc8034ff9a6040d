"""One step of `benchmarks/gpu.py`: its file, what it runs, and a recipe in one precision."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.materials import image_dataset, random_bert, text_extract
from benchmarks.options import Options
from benchmarks.recipe_side import REPOSITORY, load_recipe, train_recipe
from benchmarks.rounds import Comparison


@dataclass
class Step:
    """What one step is asked for, and what it found so far."""

    file: Path
    tiny: bool  # as small as can be: does it run?
    options: Options  # of the suites
    tokenizer: Path | None
    found: dict[str, Any] = field(default_factory=lambda: {"figures": {}, "goals": []})

    def write(self) -> None:
        """Write all of it anew, so that a kill loses nothing."""
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        os.replace(part, self.file)

    def note(self, name: str, figures: Any) -> None:
        """Keep figures under a name."""
        self.found["figures"][name] = figures
        self.write()

    def goal(self, title: str, value: float, least: float | None, most: float | None) -> None:
        """Keep a figure that there is a goal for."""
        aim = Comparison(title, "", "", least, most)
        reached = aim.is_reached(value)
        row = {"title": title, "value": value, "goal": aim.goal, "reached": reached}
        self.found["goals"].append(row)
        self.write()

    def run(self, name: str, command: Sequence[object], **environment: str) -> float:
        """Run a command in a process, its output into the log, and return its seconds."""
        print(f"--- {name}: {' '.join(map(str, command))}", flush=True)
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *map(str, command)], env=os.environ | environment, check=True
        )
        return time.perf_counter() - began

    def recipe(self, name: str, recipe: str, *flags: object) -> tuple[Path, float]:
        """Run a recipe as a user does; return its directory, and its seconds from the shell."""
        directory = self.file.parent / name
        shutil.rmtree(directory, ignore_errors=True)
        script = REPOSITORY / "recipes" / f"{recipe}.py"
        words = [script, *flags, "--output-dir", directory, "--tracker", "none"]
        return directory, self.run(name, words)

    def data_of(self, recipe: str) -> dict[str, Any]:
        """Return what a recipe trains on: its public data where they are at hand."""
        if recipe == "bert":
            rows = 64 if self.tiny else 20_000
            checkpoint = random_bert("tiny" if self.tiny else "base", self.tokenizer)
            return {"dataset": str(text_extract(self.options.data, rows)), "model": str(checkpoint)}
        size = {} if recipe == "mnist_mlp" else {"image_size": 32}
        found = image_dataset(
            self.options.data, {"mnist_mlp": "mnist", "resnet": "cifar10"}[recipe]
        )
        return {"dataset": found} if found != "digits" else {"dataset": "synthetic", **size}

    def cell(
        self, name: str, recipe: str, steps: int, compiled: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Train a recipe, first with waits in its loop as errors; keep and return its figures."""
        import torch

        from benchmarks.contestants import threads
        from benchmarks.guarded import without_waiting
        from benchmarks.isolation import isolated
        from common.errors import UserError
        from common.measure import memory

        module, figures = load_recipe(recipe), dict[str, Any]()
        settings |= {"compile": compiled, "log_every": max(2, steps // 3)}
        for guarded in (True, False):
            memory.EARLIER.clear()
            if torch.cuda.is_available():
                torch.cuda.init()
                torch.cuda.reset_peak_memory_stats()
            if compiled:  # what was compiled for other precisions counts against a limit
                torch.compiler.reset()
            # Shapes that come for the first time are compiled then, and that may wait.
            settled = steps // 2 if compiled else 5
            guard = without_waiting(module, settled) if guarded else nullcontext()
            try:
                with isolated(threads()), guard:
                    training = train_recipe(module, steps, **settings)
            except UserError as refusal:
                figures["refused"] = refusal.message
            except Exception as problem:
                figures["waits" if "synchroniz" in str(problem) else "failed"] = last_lines(problem)
                if guarded and "waits" in figures:
                    continue
            else:
                figures |= {"samples_per_second": training.samples / training.seconds}
                figures |= {k: v for k, v in training.summary.items() if not k.startswith("val")}
            break
        self.note(name, figures)
        return figures


def last_lines(problem: Exception) -> str:
    """Return where an error came from, and what it said."""
    return "".join(traceback.format_exception(problem))[-1500:]
