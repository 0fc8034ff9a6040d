"""Runs a recipe as a user would, once for a seed, and times the whole command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TimedCommand:
    """A finished command, and its figures."""

    seconds: float  # wall clock of the whole command, imports included, as the shell sees it
    figures: dict[str, float]  # those of `summary.json`
    load_average_before: float


def run_whole_command(
    recipe: Path, dataset: str, seed: int, flags: list[str], kept_runs: Path | None
) -> TimedCommand:
    """Train with one seed in a process of its own, with an empty cache.

    Args:
        kept_runs: the run is published in a folder of this folder, named after the seed. None: it
            is not kept.

    Raises:
        SystemExit: the command failed.
    """
    from common.run_directory.record_files import read_record
    from common.run_directory.records import Summary

    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / f"seed-{seed}"
        command = [sys.executable, str(recipe), "--dataset", dataset, "--seed", str(seed)]
        command += ["--tracker", "none", "--output-dir", str(directory), *flags]
        environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder) / "cache")}
        start = time.perf_counter()
        finished = subprocess.run(command, env=environment)
        seconds = time.perf_counter() - start
        if finished.returncode != 0:
            raise SystemExit(f"seed {seed} ended with status {finished.returncode}: see above")
        figures = read_record(directory / "summary.json", Summary).figures
        if kept_runs is not None:
            from common.tools.reproduce.publishing import publish_if_possible  # loads torch

            publish_if_possible(directory, kept_runs / f"seed-{seed}")
    return TimedCommand(seconds, figures, load_average)
