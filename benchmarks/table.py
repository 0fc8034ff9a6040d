"""Turn what `peers.py` has written into tables for the README.

python -m benchmarks.table benchmarks/results/FILE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TITLES = {
    "mnist": "MNIST MLP",
    "mnist_128": "MNIST MLP",
    "resnet": "ResNet-18, CIFAR-10",
    "resnet50": "ResNet-50, synthetic",
    "bert": "BERT, SST-2",
}


def markdown(results: dict[str, Any]) -> str:
    """Return a table of rates, and one of all other ratios.

    Args:
        results: one file's, as `benchmarks.harness.results.write` writes them.
    """
    rates = ["| samples a second | | recipe / this | goal |", "|---|--:|--:|--:|"]
    others = ["| ratio of | goal | |", "|---|--:|--:|"]
    for name, suite in results["suites"].items():
        contestants = suite["contestants"]
        if name in TITLES:
            batch, ours = suite["workload"]["batch_size"], contestants["recipe"]["value"]
            title = f"{TITLES[name]}, batch {batch}: the recipe"
            rates.append(f"| **{title}** | **{rate(ours)}** | | |")
        for comparison in suite["comparisons"]:
            ratio = shown(comparison["ratio"])
            if name not in TITLES:
                both = [contestants[comparison[side]]["value"] for side in ("ours", "theirs")]
                amounts = " : ".join(f"{value:,.0f}" for value in both)
                amounts = f", {amounts} MiB" if suite["unit"] == "MiB" else ""
                others.append(
                    f"| {comparison['title']} | {comparison['goal']} | {ratio}{amounts} |"
                )
            elif comparison["ours"] == "recipe":
                theirs = comparison["theirs"]
                value, goal = rate(contestants[theirs]["value"]), comparison["goal"]
                rates.append(f"| {theirs} | {value} | {ratio} | {goal} |")
    return "\n".join([*rates, "", *others])


def rate(value: float) -> str:
    """Return a rate with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def shown(ratio: dict[str, float]) -> str:
    """Return the median of a ratio, and its range over the rounds."""
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}–{ratio['most']:.2f})"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
