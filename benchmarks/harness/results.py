"""Prints and writes the results of suites, and describes this machine."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
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
from benchmarks.harness.result_file import write_results
from benchmarks.harness.rounds import Comparison, Measurement, Suite
from common.system.devices import device_name
from common.system.git import commit_of_library

Facts = dict[str, Any]  # a JSON object of the file of results
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
# The names of options in published files, where they differ from those of the flags.
RECORDED_NAMES = {"scale": "steps"}
OUTCOMES = {None: "", True: "yes", False: "no"}  # whether a goal is reached
CONSOLE = Console(highlight=False, width=None if Console().is_terminal else 150)


def describe_machine(rates: Mapping[str, float] | None = None) -> Facts:
    """Return the facts that the figures depend on: hardware, rates, versions, commit and time.

    Args:
        rates: of this machine; see `roofs.measure_machine`. None: they were not measured.
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
        "rates": {name: round(rate, 1) for name, rate in (rates or {}).items()},
        "versions": versions,
        "git_commit": commit_of_library(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def default_file() -> Path:
    """Return the file in `benchmarks/results` that is named after the device."""
    device = re.sub(r"[^a-z0-9]+", "-", device_name(default_device()).lower()).strip("-")
    return RESULTS / f"peers-{device}.json"


def summarize(suite: Suite) -> Facts:
    """Return a suite's figures as plain values."""
    return {
        "unit": suite.unit,
        "steps": suite.updates,
        "workload": suite.workload,
        "comparisons": [
            summarize_comparison(suite, comparison) for comparison in suite.comparisons
        ],
        "contestants": {name: summarize_contestant(suite, name) for name in suite.measurements},
        "quoted": suite.quoted,
        "notes": suite.notes,
        "seconds": round(suite.seconds, 1),
    }


def summarize_comparison(suite: Suite, comparison: Comparison) -> dict[str, object]:
    """Return a comparison's ratio over the rounds, and whether it reached the goal."""
    least, median, most = spread(suite, comparison)
    return {
        "title": comparison.title,
        "ours": comparison.ours,
        "theirs": comparison.theirs,
        "goal": comparison.goal,
        "ratio": {
            "median": round(median, 4),
            "least": round(least, 4),
            "most": round(most, 4),
        },
        "reached": comparison.is_reached(median),
    }


def summarize_contestant(suite: Suite, name: str) -> dict[str, object]:
    """Return the medians of a contestant's figures, and the figures of each round."""
    medians = {figure.name: suite.median(name, figure.name) for figure in fields(Measurement)}
    rounds = [known_values(measurement) for measurement in suite.measurements[name]]
    return {**medians, "rounds": rounds}


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


def write(file: Path, machine: Facts, options: Options, suites: list[Suite]) -> None:
    """Write all suites so far, each with the machine's facts and the options, without any path.

    Other suites in the file stay if they were measured with the same versions and options.
    """
    origin = {**machine, "options": recorded_options(options)}
    measured = {suite.name: {**origin, **summarize(suite)} for suite in suites}
    content = {"suites": comparable_suites(file, origin) | measured}
    write_results(file, content)


def recorded_options(options: Options) -> Facts:
    """Return the options that a file of results has; paths are replaced by their last part."""
    return {
        RECORDED_NAMES.get(name, name): value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("output", "suites")
    }


def comparable_suites(file: Path, origin: Facts) -> Facts:
    """Return the suites in a file that have the versions and the options of `origin`."""
    if not file.exists():
        return {}
    suites = json.loads(file.read_text(encoding="utf-8"))["suites"]
    return {
        name: suite
        for name, suite in suites.items()
        if suite["versions"] == origin["versions"] and suite["options"] == origin["options"]
    }


def show(suite: Suite) -> None:
    """Print a suite's table, the rates that peers should reach, and the notes."""
    table = Table(title=f"{suite.name}: {suite.updates} updates a round", title_justify="left")
    for column in ("ratio of", "goal", "median (least … most)", "", suite.unit):
        table.add_column(column, no_wrap=column != "ratio of")
    has_loss = any(suite.median(name, "train_loss") is not None for name in suite.measurements)
    if has_loss:
        table.add_column("training loss")
        table.add_column("accuracy")
    for comparison in suite.comparisons:
        least, median, most = spread(suite, comparison)
        row = [
            comparison.title,
            comparison.goal,
            f"{median:.3g} ({least:.3g} … {most:.3g})",
            OUTCOMES[comparison.is_reached(median)],
            pair(suite, comparison, "value", ",.4g" if suite.unit == "s" else ",.0f"),
        ]
        if has_loss:
            row += [
                pair(suite, comparison, "train_loss", ".4f"),
                pair(suite, comparison, "accuracy", ".4f"),
            ]
        table.add_row(*row)
    CONSOLE.print(table, markup=False)
    for name, quoted_rate in suite.quoted.items():
        rate = suite.median(name) or float("nan")
        CONSOLE.print(
            f"  {name}: {rate:,.1f} {suite.unit}, {rate / quoted_rate:.0%} of the "
            f"{quoted_rate:,g} that such a loop reached on two cores of this kind",
            markup=False,
        )
    for note in suite.notes:
        CONSOLE.print(f"  {note}", markup=False)


def pair(suite: Suite, comparison: Comparison, figure: str, form: str) -> str:
    """Return both sides' medians of a figure in words, without those that are unknown."""
    medians = (suite.median(comparison.ours, figure), suite.median(comparison.theirs, figure))
    return " : ".join(format(median, form) for median in medians if median is not None)
