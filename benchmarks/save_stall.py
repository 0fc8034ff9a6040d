"""How long `run.save()` keeps the training waiting, against what it could not do without.

python benchmarks/save_stall.py
python benchmarks/save_stall.py --rounds 15 --recipes resnet

Per recipe, in one process, after each of some updates and in turn: a plain clone of every tensor
of the state (weights, buffers, optimizer: what any checkpoint must copy), `run.save()`, and
Accelerate's `save_state`, which writes while the training waits. The writing in the background is
waited for before the next is timed, and its time is shown too.
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
from typing import Any

import torch
import tyro
from rich.table import Table

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.isolation import synchronize
from benchmarks.harness.results import CONSOLE
from common.run import Run

REPOSITORY = Path(__file__).resolve().parents[1]
FLAGS = {
    "resnet": ("--dataset", "digits", "--image-size", "32", "--batch-size", "16"),
    "mnist_mlp": ("--dataset", "digits", "--batch-size", "16"),
}
SHOWN = {
    "clone": "clone of the state",
    "save": "run.save()",
    "written": "  until it is on disk",
    "save_state": "Accelerate's save_state",
}
WARM_UP = 2  # rounds that are not counted: memory is new, files are


@dataclass(kw_only=True)
class Options:
    """Measure how long a checkpoint keeps the training waiting."""

    rounds: int = 7
    """Rounds that count; the medians are shown."""
    recipes: tuple[str, ...] = ("resnet", "mnist_mlp")
    """Recipes whose models to save."""


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    synchronize()
    began = time.perf_counter()
    kept = work()
    synchronize()
    ended = time.perf_counter()
    del kept
    return 1000 * (ended - began)


def state_tensors(run: Run) -> list[torch.Tensor]:
    """Return the weights, buffers and optimizer state of a run."""
    optimizer = [
        value
        for values in run.kept_parts.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return [
        *run.kept_parts.bare_model.parameters(),
        *run.kept_parts.bare_model.buffers(),
        *optimizer,
    ]


def measure(recipe: str, rounds: int) -> None:
    """Train a few updates of a recipe, and write what each way of saving took to a file."""
    folder = Path(sys.argv[1])
    times: dict[str, list[float]] = {name: [] for name in SHOWN}
    facts: dict[str, Any] = {}
    save = Run.save

    def save_in_all_ways(run: Run) -> None:
        tensors = state_tensors(run)
        facts["mib"] = sum(tensor.nbytes for tensor in tensors) / 2**20
        target = folder / "accelerate"

        def write() -> None:
            save(run)
            run.checkpoints.wait()

        ways: dict[str, Callable[[], object]] = {
            "clone": lambda: [tensor.detach().clone() for tensor in tensors],
            "save": lambda: save(run),
            "written": write,
            "save_state": lambda: run.accelerator.save_state(str(target)),
        }
        for name, way in ways.items():
            run.checkpoints.last_step = -1  # or the second of a step would do nothing
            times[name].append(timed(way))
            run.checkpoints.wait()
            shutil.rmtree(target, ignore_errors=True)

    Run.save = save_in_all_ways  # type: ignore[method-assign, assignment]
    script = str(REPOSITORY / "recipes" / f"{recipe}.py")
    updates = str(rounds + WARM_UP)
    sys.argv = [
        *(script, *FLAGS[recipe], "--tracker", "none", "--output-dir", str(folder / "run")),
        *("--checkpoint-every", "1", "--max-steps", updates, "--log-every", updates),
    ]
    runpy.run_path(script, run_name="__main__")
    facts |= {name: values[WARM_UP:] for name, values in times.items()}
    (folder / "times.json").write_text(json.dumps(facts), encoding="utf-8")


def main(options: Options) -> None:
    """Measure each recipe in a process of its own, and print a table of medians."""
    table = Table(title=f"milliseconds, median (least–most) of {options.rounds} rounds")
    for column in ("recipe", "state", *SHOWN.values()):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for recipe in options.recipes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.save_stall", folder, recipe]
            subprocess.run(
                [*command, str(options.rounds)],
                cwd=REPOSITORY,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            facts = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
        cells = [
            f"{median(facts[name]):,.1f} ({min(facts[name]):,.1f}–{max(facts[name]):,.1f})"
            for name in SHOWN
        ]
        table.add_row(recipe, f"{facts['mib']:,.0f} MiB", *cells)
    CONSOLE.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2] in FLAGS:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Options))
