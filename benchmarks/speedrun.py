"""Repeat and verify the CIFAR-10 speedrun of docs/speedrun.md, with several seeds.

    python benchmarks/speedrun.py --dataset cifar10 --seeds 0 1 2

Each seed is one whole command: start, preparation of the data, training, and final evaluations. The
seconds are those of the wall clock from the shell. They are also stated in matrix products of this
machine, measured just before each seed, so that runs on different machines can be compared. The
exit status is 1 if the mean accuracy misses the target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import TypedDict

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import REPOSITORY
from benchmarks.harness.whole_command import run_whole_command

RECIPE = REPOSITORY / "recipes" / "cifar10_fast.py"
RESULTS = REPOSITORY / "benchmarks" / "results"
TARGET = 0.94


class Entry(TypedDict):
    """One seed of a speedrun."""

    seed: int
    accuracy_tta: float  # on test, with test-time augmentation
    accuracy: float  # on test, without it
    seconds: float  # of the whole command
    training_seconds: float  # of training and evaluations between the start and the end of the loop
    matrix_gflops: float  # of a matrix product, before the run; see `matrix_precision`
    petaflops_available: float  # matrix products that the machine could have made in that time
    load_average_before: float


def run_seed(
    recipe: Path, dataset: str, seed: int, flags: list[str], kept_runs: Path | None
) -> Entry:
    """Train with one seed in a process of its own, with an empty cache.

    Raises:
        SystemExit: the command failed.
    """
    matrix_gflops = measured_matrix_gflops()
    command = run_whole_command(recipe, dataset, seed, flags, kept_runs)
    return Entry(
        seed=seed,
        accuracy_tta=command.figures["test/accuracy_tta"],
        accuracy=command.figures["test/accuracy"],
        seconds=round(command.seconds, 1),
        training_seconds=round(command.figures["time/train_seconds"], 1),
        matrix_gflops=round(matrix_gflops, 1),
        petaflops_available=round(command.seconds * matrix_gflops / 1e6, 3),
        load_average_before=round(command.load_average_before, 2),
    )


def measured_matrix_gflops() -> float:
    """Return the rate of matrix products, measured in a process of its own."""
    from benchmarks.harness.fresh_code import printed_by

    code = (
        "from benchmarks.harness.precisions import DTYPES; "
        "from benchmarks.harness.roofs import matrix_rate; "
        f"print(matrix_rate(DTYPES['{matrix_precision()}']) / 1e9)"
    )
    return float(printed_by(code))


def matrix_precision() -> str:
    """Return the precision of the matrix products: bf16, or fp32 on some CPUs.

    A CPU without instructions for bf16 would need minutes for such a product, and recipes train
    there in fp32.
    """
    from benchmarks.harness.roofs import default_device
    from common.training.precision import cpu_has_bf16

    is_slow = default_device().type == "cpu" and not cpu_has_bf16()
    return "fp32" if is_slow else "bf16"


def show(entries: list[Entry]) -> None:
    """Print each seed, and the mean and standard deviation over seeds."""
    print("seed  accuracy with TTA  without  seconds  PFLOP available")
    for entry in entries:
        figures = f"{entry['accuracy_tta']:17.2%}  {entry['accuracy']:7.2%}"
        print(
            f"{entry['seed']:4}  {figures}  {entry['seconds']:7.0f}  "
            f"{entry['petaflops_available']:15.3f}"
        )
    if len(entries) > 1:
        for name, form in (("accuracy_tta", ".2%"), ("accuracy", ".2%"), ("seconds", ".0f")):
            values = [float(entry[name]) for entry in entries]  # type: ignore[literal-required]
            print(f"{name}: {mean(values):{form}} ± {stdev(values):{form}} (n = {len(values)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cifar10", help="name, Hub id or local folder")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="a copy of the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS / "speedrun.json")
    parser.add_argument("--keep-runs", type=Path, help="folder to publish the runs in")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the recipe")
    arguments = parser.parse_args()
    from benchmarks.harness.result_file import write_results
    from benchmarks.harness.results import describe_machine

    entries: list[Entry] = []
    for seed in arguments.seeds:
        entry = run_seed(
            arguments.recipe, arguments.dataset, seed, arguments.flags, arguments.keep_runs
        )
        entries.append(entry)
        name = f"matrix product {matrix_precision()}, GFLOP/s"
        facts = describe_machine({name: entry["matrix_gflops"]})
        results = {"target": TARGET, "flags": arguments.flags, "machine": facts, "runs": entries}
        write_results(arguments.output, results)
    show(entries)
    accuracy = mean(entry["accuracy_tta"] for entry in entries)
    if accuracy < TARGET:
        raise SystemExit(f"missed: the mean accuracy is {accuracy:.2%}, below {TARGET:.0%}")


if __name__ == "__main__":
    main()
