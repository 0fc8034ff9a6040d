"""Repeat a result of docs/results.md: train a recipe once for each seed, and time the command.

    python benchmarks/seeds.py recipes/mnist_mlp.py --dataset mnist --seeds 6 7 8 -- --keep last

Each seed is one whole command with an empty cache: start, preparation of the data, training, and
the final evaluation. The seconds are those of the wall clock from the shell. The script prints the
mean, the standard deviation and the 95 % interval of the mean over the seeds. The flags after `--`
go to the recipe. `--runs FOLDER` publishes the runs there, with a file `seeds.json` of the figures.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TypedDict

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.result_file import write_results
from benchmarks.harness.text_tables import aligned_table
from benchmarks.harness.whole_command import TimedCommand, run_whole_command
from common.objective import EVALUATION_PREFIXES
from common.tools.statistics.samples import CONFIDENCE, Sample
from common.tools.statistics.student import quantile

OTHER_PROGRAMS = "perf/other_cpu_fraction"  # share of the processor time that others used


class SeedFigures(TypedDict):
    """One seed of a result."""

    seed: int
    seconds: float  # of the whole command
    figures: dict[str, float]  # of the final evaluation, and the share of other programs


def figures_of(seed: int, command: TimedCommand) -> SeedFigures:
    """Return the figures of a finished command that a table of results states."""
    stated = {
        name: value
        for name, value in command.figures.items()
        if name.startswith(EVALUATION_PREFIXES) and not name.endswith("/count")
    }
    if OTHER_PROGRAMS in command.figures:
        stated[OTHER_PROGRAMS] = command.figures[OTHER_PROGRAMS]
    return SeedFigures(seed=seed, seconds=round(command.seconds, 1), figures=stated)


def mean_interval(sample: Sample) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean by Student's t; None for fewer than two values."""
    if sample.mean is None or sample.deviation is None:
        return None
    margin = quantile(0.5 + CONFIDENCE / 2, sample.count - 1) * sample.deviation
    margin /= math.sqrt(sample.count)
    return sample.mean - margin, sample.mean + margin


def summary_lines(runs: list[SeedFigures]) -> list[str]:
    """Return a line for each figure: mean, standard deviation, and the mean's 95 % interval."""
    values = {"seconds": [run["seconds"] for run in runs]}
    for name in runs[0]["figures"]:
        values[name] = [run["figures"][name] for run in runs if name in run["figures"]]
    rows = [("figure", "mean", "deviation", "95 % interval of the mean", "seeds")]
    for name, figures in values.items():
        sample = Sample.of(figures)
        interval = mean_interval(sample)
        deviation = "–" if sample.deviation is None else f"{sample.deviation:.2g}"
        bounds = "–" if interval is None else f"{interval[0]:.5g} to {interval[1]:.5g}"
        rows.append((name, f"{sample.mean:.5g}", deviation, bounds, str(sample.count)))
    return aligned_table(rows, names=1).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, help="a recipe, an example or a copy")
    parser.add_argument("--dataset", required=True, help="name, Hub id or local folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="folder to publish the runs and figures in")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the recipe")
    arguments = parser.parse_intermixed_args()
    from benchmarks.harness.results import describe_machine  # loads torch

    machine = describe_machine()
    runs: list[SeedFigures] = []
    for seed in arguments.seeds:
        command = run_whole_command(
            arguments.recipe, arguments.dataset, seed, arguments.flags, arguments.runs
        )
        runs.append(figures_of(seed, command))
        if arguments.runs is not None:
            results = {"flags": arguments.flags, "machine": machine, "runs": runs}
            write_results(arguments.runs / "seeds.json", results)
    print("\n".join(summary_lines(runs)))


if __name__ == "__main__":
    main()
