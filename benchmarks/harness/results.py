"""Shows and writes what was measured."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.isolation import default_device
from benchmarks.harness.options import Options
from benchmarks.harness.rounds import Comparison, Measurement, Suite
from common.system.devices import device_name
from common.track.facts import git_commit

RESULTS = Path(__file__).resolve().parents[1] / "results"
PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "lightning",
    "timm",
    "wandb",
    "numpy",
)
CONSOLE = Console(highlight=False, width=None if Console().is_terminal else 150)


def describe_machine(rates: dict[str, float]) -> dict[str, Any]:
    """Return what the figures depend on besides the code.

    Args:
        rates: of this machine, measured in this run.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "hardware": {
            "device": device_name(default_device()),
            "processor": device_name(torch.device("cpu")),
            "threads": torch.get_num_threads(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_average_before": round(os.getloadavg()[0], 2),
        },
        "rates": {name: round(rate, 1) for name, rate in rates.items()},
        "versions": versions,
        "git_commit": git_commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def default_file() -> Path:
    """Return the file in `benchmarks/results` that is named by the device."""
    device = re.sub(r"[^a-z0-9]+", "-", device_name(default_device()).lower()).strip("-")
    return RESULTS / f"peers-{device}.json"


def summarize(suite: Suite) -> dict[str, Any]:
    """Return a suite's figures as plain values."""
    comparisons = []
    for comparison in suite.comparisons:
        low, median, high = spread(suite, comparison)
        comparisons.append(
            {
                "title": comparison.title,
                "ours": comparison.ours,
                "theirs": comparison.theirs,
                "goal": comparison.goal,
                "ratio": {
                    "median": round(median, 4),
                    "least": round(low, 4),
                    "most": round(high, 4),
                },
                "reached": comparison.is_reached(median),
            }
        )
    contestants = {
        name: {
            **{
                figure: suite.median(name, figure)
                for figure in ("value", "train_loss", "evaluation_loss", "accuracy", "mfu")
            },
            "rounds": [known_values(one) for one in measurements],
        }
        for name, measurements in suite.measurements.items()
    }
    return {
        "unit": suite.unit,
        "steps": suite.steps,
        "workload": suite.workload,
        "comparisons": comparisons,
        "contestants": contestants,
        "quoted": suite.quoted,
        "notes": suite.notes,
        "seconds": round(suite.seconds, 1),
    }


def known_values(measurement: Measurement) -> dict[str, float]:
    """Return the figures that a measurement has, rounded."""
    return {
        name: round(value, 4) for name, value in asdict(measurement).items() if value is not None
    }


def spread(suite: Suite, comparison: Comparison) -> tuple[float, float, float]:
    """Return the least, the median and the greatest ratio of a comparison."""
    ratios = sorted(comparison.ratios(suite.measurements))
    middle = len(ratios) // 2
    median = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    return ratios[0], median, ratios[-1]


def write(file: Path, machine: dict[str, Any], options: Options, suites: list[Suite]) -> None:
    """Write all suites so far, each with the machine's state as of its run, and without a path.

    What the file holds of other suites stays, if it was measured with the same versions.
    """
    asked = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("output", "suites")
    }
    origin = {**machine, "options": asked}
    kept: dict[str, Any] = {}
    if file.exists():
        earlier = json.loads(file.read_text(encoding="utf-8"))["suites"]
        same = ("versions", "options")
        kept = {n: one for n, one in earlier.items() if all(one[k] == origin[k] for k in same)}
    measured = {suite.name: {**origin, **summarize(suite)} for suite in suites}
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"suites": kept | measured}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def show(suite: Suite) -> None:
    """Print a suite's table."""
    table = Table(title=f"{suite.name}: {suite.steps} updates a round", title_justify="left")
    for column in ("ratio of", "goal", "median (least … most)", "", suite.unit):
        table.add_column(column, no_wrap=column != "ratio of")
    judged = any(suite.median(name, "train_loss") is not None for name in suite.measurements)
    if judged:
        table.add_column("training loss")
        table.add_column("accuracy")
    for comparison in suite.comparisons:
        low, median, high = spread(suite, comparison)
        reached = comparison.is_reached(median)
        row = [
            comparison.title,
            comparison.goal,
            f"{median:.3g} ({low:.3g} … {high:.3g})",
            "" if reached is None else "yes" if reached else "no",
            pair(suite, comparison, "value", ",.4g" if suite.unit == "s" else ",.0f"),
        ]
        if judged:
            row += [
                pair(suite, comparison, "train_loss", ".4f"),
                pair(suite, comparison, "accuracy", ".4f"),
            ]
        table.add_row(*row)
    CONSOLE.print(table, markup=False)
    for name, rate in suite.quoted.items():
        measured = suite.median(name) or float("nan")
        CONSOLE.print(
            f"  {name}: {measured:,.1f} {suite.unit}, {measured / rate:.0%} of the {rate:,g} that "
            "such a loop was seen to reach on two cores of this kind",
            markup=False,
        )
    for note in suite.notes:
        CONSOLE.print(f"  {note}", markup=False)


def pair(suite: Suite, comparison: Comparison, figure: str, form: str) -> str:
    """Return the medians of a figure of both sides, for people."""
    ours, theirs = (suite.median(name, figure) for name in (comparison.ours, comparison.theirs))
    known = [format(value, form) for value in (ours, theirs) if value is not None]
    return " : ".join(known)
