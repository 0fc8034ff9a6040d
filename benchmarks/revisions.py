"""Two checkouts of this repository against each other: has a change made the recipes slower?

    git worktree add ../before REVISION
    python benchmarks/revisions.py ../before .

In turns, each time in a fresh process, the MNIST recipe trains at its default batch and in batches
of 128, and a small MLP of which the loop itself is most of the time; what is timed is the loop
from outside, as in `benchmarks/harness/recipe_side.py` of each checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

# Of each case: recipe, updates, and what differs from the recipe's defaults.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "MNIST, batch 512": ("mnist_mlp", 350, {}),
    "MNIST, batch 128": ("mnist_mlp", 900, {"batch_size": 128}),
    "loop, MLP 784-16-10, batch 128": (
        "mnist_mlp",
        2000,
        {"batch_size": 128, "hidden_sizes": [16], "mixed_precision": "no"},
    ),
    "ResNet-18, batch 64": ("resnet", 12, {"batch_size": 64}),
}
TURN = """
import json, sys
try:
    from benchmarks.harness.recipe_side import load_recipe, train_recipe
except ModuleNotFoundError:  # an older revision
    from benchmarks.recipe_side import load_recipe, train_recipe
recipe, steps, settings = json.loads(sys.argv[1])
settings = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
training = train_recipe(load_recipe(recipe), steps, **settings)
print("rate", training.samples / training.seconds)
"""


@dataclass(kw_only=True)
class Options:
    """Compare the training speed of two checkouts."""

    before: Annotated[Path, tyro.conf.Positional]
    """Checkout to compare with."""
    after: Annotated[Path, tyro.conf.Positional]
    """Checkout whose change is in question."""
    rounds: int = 5
    """Rounds in which both take a turn at each case."""
    mnist: str = "digits"
    """Folder of MNIST as the Hub lays it out, or a built-in data set."""


def samples_per_second(checkout: Path, case: str, options: Options) -> float:
    """Return the rate of one turn, in a process of its own."""
    recipe, steps, settings = CASES[case]
    dataset = options.mnist if recipe == "mnist_mlp" else "digits"
    request = json.dumps([recipe, steps, {"dataset": dataset, **settings}])
    done = subprocess.run(
        [sys.executable, "-c", TURN, request],
        env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
        cwd=checkout,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rate ")]
    return float(line.split()[1])


def main(options: Options) -> None:
    """Print the median rates, and the median and range of their ratio, for each case."""
    table = Table(title=f"samples/s, medians of {options.rounds} rounds")
    for column in ("", "before", "after", "after / before"):
        table.add_column(column, justify="right" if column else "left")
    for case in CASES:
        rates = [
            [samples_per_second(side, case, options) for side in (options.before, options.after)]
            for _ in range(options.rounds)
        ]
        ratios = sorted(after / before for before, after in rates)
        medians = [f"{median(column):,.0f}" for column in zip(*rates, strict=True)]
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
        table.add_row(case, *medians, spread)
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
