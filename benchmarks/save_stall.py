"""Measure how long `run.save()` keeps the training waiting, beside two other ways of saving.

python benchmarks/save_stall.py
python benchmarks/save_stall.py --rounds 15 --recipes resnet

Each recipe trains in a process of its own. After each update, these are timed in turn:

- a plain clone of every tensor of the state (weights, buffers, optimizer), which any checkpoint
  must copy at least;
- `run.save()`, which writes in the background;
- `run.save()` until the checkpoint is on disk;
- Accelerate's `save_state`, which writes while the training waits.

Before each measurement, the script waits until earlier checkpoints are written.
"""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import REPOSITORY
from benchmarks.harness.isolation import synchronize
from common.output.tables import print_table
from common.run import Run

FLAGS = {
    "resnet": ("--dataset", "digits", "--image-size", "32", "--batch-size", "16"),
    "mnist_mlp": ("--dataset", "digits", "--batch-size", "16"),
}
COLUMNS = {  # title by way of saving
    "clone": "clone of the state",
    "save": "run.save()",
    "written": "  until it is on disk",
    "save_state": "Accelerate's save_state",
}
WARMUP_ROUNDS = 2  # not counted: memory is allocated and files are created


@dataclass(kw_only=True)
class Options:
    """Measure how long a checkpoint keeps the training waiting."""

    rounds: int = 7
    """Rounds that count; the table shows medians."""
    recipes: tuple[str, ...] = ("resnet", "mnist_mlp")
    """Recipes whose models to save."""


def milliseconds_of(work: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes; freeing its result is not timed."""
    synchronize()
    began = time.perf_counter()
    result = work()
    synchronize()
    ended = time.perf_counter()
    del result
    return 1000 * (ended - began)


def state_tensors(run: Run) -> list[torch.Tensor]:
    """Return the weights, buffers and optimizer state of a run."""
    model = run.kept.bare_model
    tensors = [*model.parameters(), *model.buffers()]
    for values in run.kept.optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return tensors


class TimedSaves:
    """Stands in for `Run.save`: saves in all ways, and notes the time of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times: dict[str, list[float]] = {name: [] for name in COLUMNS}  # milliseconds
        self.mebibytes = 0.0  # of the state
        self.original_save = Run.save

    def save(self, run: Run) -> None:
        """Save in all ways in turn."""
        tensors = state_tensors(run)
        self.mebibytes = sum(tensor.nbytes for tensor in tensors) / 2**20
        target = self.folder / "accelerate"

        def save_and_wait() -> None:
            self.original_save(run)
            run.context.checkpoints.wait()

        ways: dict[str, Callable[[], object]] = {
            "clone": lambda: [tensor.detach().clone() for tensor in tensors],
            "save": lambda: self.original_save(run),
            "written": save_and_wait,
            "save_state": lambda: run.accelerator.save_state(str(target)),
        }
        for name, way in ways.items():
            # Otherwise, a second save of a step does nothing.
            run.context.checkpoints.last_step = None
            self.times[name].append(milliseconds_of(way))
            run.context.checkpoints.wait()
            shutil.rmtree(target, ignore_errors=True)

    def write(self, file: Path) -> None:
        """Write the times of the rounds that count, and the size of the state."""
        counted = {name: values[WARMUP_ROUNDS:] for name, values in self.times.items()}
        file.write_text(json.dumps({"mib": self.mebibytes, **counted}), encoding="utf-8")


def measure(folder: Path, recipe: str, rounds: int) -> None:
    """Train a few updates of a recipe, and write the time of each way of saving to a file."""
    timed_saves = TimedSaves(folder)

    def save(run: Run) -> None:
        timed_saves.save(run)

    Run.save = save  # type: ignore[method-assign, assignment]
    script = str(REPOSITORY / "recipes" / f"{recipe}.py")
    updates = str(rounds + WARMUP_ROUNDS)
    sys.argv = [
        *(script, *FLAGS[recipe], "--tracker", "none", "--output-dir", str(folder / "run")),
        *("--checkpoint-every", "1", "--max-steps", updates, "--log-every", updates),
    ]
    runpy.run_path(script, run_name="__main__")
    timed_saves.write(folder / "times.json")


def measure_in_fresh_process(recipe: str, rounds: int) -> list[str]:
    """Measure a recipe in a process of its own, and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.save_stall", folder, recipe, str(rounds)]
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
        facts = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    cells = []
    for name in COLUMNS:
        times = facts[name]
        cells.append(f"{median(times):,.1f} ({min(times):,.1f}–{max(times):,.1f})")
    return [recipe, f"{facts['mib']:,.0f} MiB", *cells]


def main(options: Options) -> None:
    """Measure each recipe, and print a table of medians."""
    rows = [["recipe", "state", *COLUMNS.values()]]
    rows += [measure_in_fresh_process(recipe, options.rounds) for recipe in options.recipes]
    print_table(rows, title=f"milliseconds, median (least–most) of {options.rounds} rounds")


if __name__ == "__main__":
    is_fresh_process = len(sys.argv) == 4 and sys.argv[2] in FLAGS
    if is_fresh_process:
        measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Options))
