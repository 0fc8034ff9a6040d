"""Compare two checkouts of this repository: has a change made the recipes slower?

    git worktree add ../before REVISION
    python benchmarks/revisions.py ../before .

Both checkouts take turns, each time in a fresh process; every other round is in reverse order. The
MNIST recipe trains at its default batch size, in batches of 128, and with a small MLP whose time is
mostly that of the loop itself.
Two short trainings of a ResNet-18 follow: on the 8 × 8 pixels of digits, and on as many pixels as
CIFAR-10 has, where tensors are large. The last one is a small BERT on docstrings. The loop is timed
from outside, by `benchmarks/harness/recipe_side.py` of each checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import tyro

if __package__ in (None, ""):  # started as a file: make the packages importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.output.tables import print_table


@dataclass(frozen=True)
class Case:
    """A training that both checkouts run."""

    recipe: str
    updates: int
    settings: dict[str, object] = field(default_factory=dict)  # other than the recipe's defaults


CASES = {
    "MNIST, batch 512": Case("mnist_mlp", 350),
    "MNIST, batch 128": Case("mnist_mlp", 900, {"batch_size": 128}),
    "loop, MLP 784-16-10, batch 128": Case(
        "mnist_mlp", 2000, {"batch_size": 128, "hidden_sizes": [16], "mixed_precision": "no"}
    ),
    "ResNet-18, batch 64": Case("resnet", 12, {"batch_size": 64}),
    "ResNet-18, 32 × 32, batch 500": Case("resnet", 8, {"batch_size": 500, "image_size": 32}),
    "BERT, docstrings": Case("bert", 60),
}
# Runs with the modules of a checkout, which may be an older revision.
TRAIN_ONCE = """
import json, sys
try:
    from benchmarks.harness.recipe_side import load_recipe, train_recipe
except ModuleNotFoundError:  # a revision from before the package `harness`
    from benchmarks.recipe_side import load_recipe, train_recipe
recipe, updates, settings = json.loads(sys.argv[1])
settings = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
training = train_recipe(load_recipe(recipe), updates, **settings)
print("rate", training.samples / training.seconds)
"""


@dataclass(kw_only=True)
class Options:
    """Compare the training speed of two checkouts."""

    before: Annotated[Path, tyro.conf.Positional]
    """Checkout to compare with."""
    after: Annotated[Path, tyro.conf.Positional]
    """Checkout with the change."""
    rounds: int = 5
    """Rounds; in each round, both checkouts take a turn at each case."""
    mnist: str = "digits"
    """Folder of MNIST as the Hub lays it out, or the name of a built-in data set."""


def samples_per_second(checkout: Path, case: Case, options: Options) -> float:
    """Return the rate of one turn, in a fresh process."""
    datasets = {"mnist_mlp": options.mnist, "resnet": "digits", "bert": "docstrings"}
    settings = {"dataset": datasets[case.recipe], **case.settings}
    request = json.dumps([case.recipe, case.updates, settings])
    completed = subprocess.run(
        [sys.executable, "-c", TRAIN_ONCE, request],
        env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
        cwd=checkout,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    (line,) = [line for line in completed.stdout.splitlines() if line.startswith("rate ")]
    return float(line.split()[1])


def main(options: Options) -> None:
    """Print the median rates and the median and range of their ratio, for each case."""
    rows = [["", "before", "after", "after / before"]]
    for title, case in CASES.items():
        rates_before: list[float] = []
        rates_after: list[float] = []
        turns = [(options.before, rates_before), (options.after, rates_after)]
        for _ in range(options.rounds):
            for checkout, rates in turns:
                rates.append(samples_per_second(checkout, case, options))
            turns.reverse()  # a drift of the machine's speed then favours neither
        pairs = zip(rates_before, rates_after, strict=True)
        ratios = sorted(after / before for before, after in pairs)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
        rows.append([title, f"{median(rates_before):,.0f}", f"{median(rates_after):,.0f}", spread])
    print_table(rows, title=f"samples/s, medians of {options.rounds} rounds")


if __name__ == "__main__":
    main(tyro.cli(Options))
