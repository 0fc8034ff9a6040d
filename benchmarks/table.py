"""Turn a file of results that `peers.py` wrote into the tables of `README.md` and `peers.md` here.

python -m benchmarks.table benchmarks/results/FILE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.text_tables import markdown_table

Results = dict[str, Any]  # a JSON object that `benchmarks.harness.results` wrote
TITLES = {
    "mnist": "MNIST MLP",
    "mnist_128": "MNIST MLP",
    "resnet": "ResNet-18, CIFAR-10",
    "resnet50": "ResNet-50, synthetic",
    "bert": "BERT, SST-2",
}


def markdown(results: Results) -> str:
    """Return a table of rates and a table of all other ratios.

    Args:
        results: content of a file that `benchmarks.harness.results.write` wrote.
    """
    rates = [["samples a second", "", "recipe / this", "goal"]]
    others = [["ratio of", "goal", ""]]
    for name, suite in results["suites"].items():
        if name in TITLES:
            rates += rate_rows(TITLES[name], suite)
        else:
            others += ratio_rows(suite)
    return "\n".join([*markdown_table(rates, "lrrr"), "", *markdown_table(others, "lrr")])


def rate_rows(title: str, suite: Results) -> list[list[str]]:
    """Return the rows of a suite whose contestants train at a rate: the recipe, then its peers."""
    contestants = suite["contestants"]
    batch_size = suite["workload"]["batch_size"]
    recipe_rate = rate(contestants["recipe"]["value"])
    rows = [[f"**{title}, batch {batch_size}: the recipe**", f"**{recipe_rate}**", "", ""]]
    for comparison in suite["comparisons"]:
        if comparison["ours"] == "recipe":
            peer = comparison["theirs"]
            peer_rate = rate(contestants[peer]["value"])
            ratio = median_and_range(comparison["ratio"])
            rows.append([peer, peer_rate, ratio, comparison["goal"]])
    return rows


def ratio_rows(suite: Results) -> list[list[str]]:
    """Return the rows of a suite that is shown by its ratios; memory also by its amounts."""
    rows = []
    for comparison in suite["comparisons"]:
        figure = median_and_range(comparison["ratio"])
        if suite["unit"] == "MiB":
            ours = suite["contestants"][comparison["ours"]]["value"]
            theirs = suite["contestants"][comparison["theirs"]]["value"]
            figure += f", {ours:,.0f} : {theirs:,.0f} MiB"
        rows.append([comparison["title"], comparison["goal"], figure])
    return rows


def rate(value: float) -> str:
    """Return a rate with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def median_and_range(ratio: dict[str, float]) -> str:
    """Return the median of a ratio and its range over the rounds."""
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}–{ratio['most']:.2f})"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
