"""Remove each idea from a recipe, one at a time, and measure what the recipe loses.

    python benchmarks/ablation.py plan.json --output results.json

The plan is a JSON file that states a recipe, the flags of all its runs, and the flags that each
variant adds to them. The first variant is the one to compare with.

    {"recipe": "mnist_mlp",
     "flags": ["--dataset", "mnist", "--validation-share", "0.1", "--epochs", "10"],
     "seeds": [0, 1, 2],
     "variants": {"as it is": [], "no shifts": ["--max-shift", "0"]}}

A plan may also have "edits", for ideas that no flag expresses. They state, for a variant, texts of
the recipe and their replacements in a copy; `benchmarks/suites/cifar10_ablation.py` has examples.

A plan may state the figure of a run that is compared, as "figure"; the default is the objective on
validation data. Figures of test data describe the variants, but must not choose one. A plan may
also have a "baseline", a folder of finished runs, which stand for those of the first variant.

Each variant is trained with each seed. The seeds take turns, so that a change of the machine's
speed affects all variants alike. The file of results is written after each run. It may be the plan
of a later call, which continues with the missing runs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(REPOSITORY)


def objective_name(recipe: Path) -> str:
    """Return the name of a recipe's objective, such as accuracy."""
    match = re.search(r'^OBJECTIVE = "(\w+):', recipe.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{recipe} states no OBJECTIVE")
    return match[1]


def train(recipe: Path, flags: list[str], seed: int) -> dict[str, Any]:
    """Train a recipe once; return its final figures, and the seconds that its processes took."""
    from common.run_directory.record_files import read_record
    from common.run_directory.records import Summary

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        command = [sys.executable, str(recipe), *flags, "--seed", str(seed)]
        command += ["--tracker", "none", "--output-dir", str(directory)]
        before = children_seconds()
        began = time.perf_counter()
        finished = subprocess.run(command, capture_output=True, encoding="utf-8")
        wall_seconds = time.perf_counter() - began
        if finished.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-2000:]}")
        summary = read_record(directory / "summary.json", Summary)
    return {
        "seed": seed,
        "wall_seconds": round(wall_seconds, 1),
        "cpu_seconds": round(children_seconds() - before, 1),
        "summary": summary.figures,
    }


def children_seconds() -> float:
    """Return the seconds of all cores that this process's ended children took."""
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def published_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the seeds and figures of finished runs, which are the folders `seed-N` of a folder.

    Raises:
        SystemExit: the folder has no such run.
    """
    from common.run_directory.record_files import read_record
    from common.run_directory.records import Summary

    runs = []
    for directory in sorted(folder.glob("seed-*")):
        summary = read_record(directory / "summary.json", Summary)
        seed = int(directory.name.removeprefix("seed-"))
        runs.append({"seed": seed, "summary": summary.figures})
    if not runs:
        raise SystemExit(f"error: the plan's baseline {folder} has no folder seed-N")
    return runs


def figure_of(run: dict[str, Any], name: str) -> float:
    """Return a figure of a run, in percent.

    Raises:
        SystemExit: the run has no such figure.
    """
    if name in run["summary"]:
        return 100 * float(run["summary"][name])
    if name.startswith("val/"):
        raise SystemExit(
            f"a run has no {name}, and test data must not choose: add --validation-share 0.1 to "
            "the plan's flags, and let --eval-every be no longer than the run"
        )
    raise SystemExit(f"a run has no {name}: change the plan's figure")


def figures_of(plan: dict[str, Any], variant: str, name: str) -> list[float]:
    """Return a figure of each run of a variant, in percent."""
    return [figure_of(run, name) for run in plan["runs"].get(variant, [])]


def as_markdown(plan: dict[str, Any], name: str) -> str:
    """Return a table of the variants: mean figures, and what each differs by from the first.

    All figures are percentages. The CPU time is that of all cores; it is unknown for runs of a
    baseline.

    Args:
        name: the figure's name in the summaries, such as "val/accuracy".
    """
    from benchmarks.harness.text_tables import markdown_table

    reference = next(iter(plan["variants"]))
    reference_mean = mean(figures_of(plan, reference, name))
    rows = [["variant", name, "difference", "deviation", "seeds", "CPU seconds"]]
    for variant, runs in plan["runs"].items():
        figures = figures_of(plan, variant, name)
        if not figures:
            continue
        # Adding 0 turns -0.00 into 0.00.
        difference = round(mean(figures) - reference_mean, 2) + 0.0
        cpu_seconds = [run["cpu_seconds"] for run in runs if "cpu_seconds" in run]
        rows.append(
            [
                variant,
                f"{mean(figures):.2f} %",
                "–" if variant == reference else f"{difference:+.2f}",
                f"{stdev(figures):.2f}" if len(figures) > 1 else "–",
                str(len(runs)),
                f"{mean(cpu_seconds):.0f}" if cpu_seconds else "–",
            ]
        )
    return "\n".join(markdown_table(rows, "lrrrrr"))


def chance_in_words(plan: dict[str, Any], name: str) -> str | None:
    """Return by how much single runs would differ from the first variant by chance.

    The limit is Student's, for a single further run. It is widened for the number of variants, so
    that 95 % of experiments without any effect have no difference beyond it (Bonferroni). The
    result is None unless the first variant has several seeds and each other variant has one.
    """
    from common.tools.statistics.samples import Sample, simultaneous_confidence
    from common.tools.statistics.student import quantile

    reference, *others = plan["variants"]
    variants = [variant for variant in others if plan["runs"].get(variant)]
    sample = Sample.of(figures_of(plan, reference, name))
    has_single_runs = all(len(plan["runs"][variant]) == 1 for variant in variants)
    if not variants or not has_single_runs or not sample.deviation:
        return None
    confidence = simultaneous_confidence(len(variants))
    limit = quantile(0.5 + confidence / 2, sample.count - 1)
    margin = limit * sample.deviation * math.sqrt(1 + 1 / sample.count)
    return (
        f"If none of the {len(variants)} variants had an effect, all their differences would be "
        f"within ± {margin:.2f} points in 95 % of experiments."
    )


def intervals_in_words(plan: dict[str, Any], name: str) -> list[str]:
    """Return a sentence for each variant with several seeds: what it differs by from the first.

    The intervals are Welch's. They are widened for the number of variants, so that all of them hold
    at once in 95 % of experiments (Bonferroni).
    """
    from common.tools.statistics.samples import Sample, simultaneous_confidence, welch_interval

    reference, *others = plan["variants"]
    variants = [variant for variant in others if len(plan["runs"].get(variant, [])) > 1]
    confidence = simultaneous_confidence(len(variants))
    reference_sample = Sample.of(figures_of(plan, reference, name))
    sentences = []
    for variant in variants:
        sample = Sample.of(figures_of(plan, variant, name))
        interval = welch_interval(reference_sample, sample, confidence)
        if interval is not None:
            sentences.append(
                f"{variant}: the difference is {interval.difference:+.2f} points, with a 95 % "
                f"interval of {interval.low:+.2f} to {interval.high:+.2f} (Welch)"
            )
    return sentences


def sentences_about(plan: dict[str, Any], name: str) -> list[str]:
    """Return what the script says below its table."""
    chance = chance_in_words(plan, name)
    sentences = [] if chance is None else [chance]
    return sentences + intervals_in_words(plan, name)


def add_published_runs(plan: dict[str, Any]) -> None:
    """Put the finished runs of a plan's baseline, if it has one, before those of its first variant.

    An earlier call may have trained further seeds of this variant.
    """
    if "baseline" not in plan:
        return
    reference = next(iter(plan["variants"]))
    published = published_runs(REPOSITORY / plan["baseline"])
    published_seeds = [run["seed"] for run in published]
    trained = [run for run in plan["runs"][reference] if run["seed"] not in published_seeds]
    plan["runs"][reference] = published + trained


def train_missing_runs(plan: dict[str, Any], recipe: Path, name: str, output: Path) -> None:
    """Train each variant with each seed that it lacks, and write the plan after each run.

    Args:
        name: the compared figure's name in the summaries.
        output: the file of results.
    """
    from benchmarks.harness.edited_recipe import edited_recipe
    from benchmarks.harness.result_file import write_results

    for seed in plan["seeds"]:
        for variant, flags in plan["variants"].items():
            runs = plan["runs"].setdefault(variant, [])
            if seed in [run["seed"] for run in runs]:
                continue
            with edited_recipe(recipe, plan.get("edits", {}).get(variant, {})) as path:
                run = train(path, [*plan["flags"], *flags], seed)
            figure = figure_of(run, name)
            runs.append(run)
            write_results(output, plan)
            print(f"seed {seed}, {variant}: {figure:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    from benchmarks.harness.results import describe_machine

    plan = json.loads(arguments.plan.read_text(encoding="utf-8"))
    recipe = REPOSITORY / "recipes" / f"{plan['recipe']}.py"
    name = plan.get("figure", f"val/{objective_name(recipe)}")
    plan.setdefault("runs", {variant: [] for variant in plan["variants"]})
    add_published_runs(plan)
    plan["machine"] = describe_machine()
    train_missing_runs(plan, recipe, name, arguments.output)
    print(as_markdown(plan, name))
    for sentence in sentences_about(plan, name):
        print(f"\n{sentence}")


if __name__ == "__main__":
    main()
