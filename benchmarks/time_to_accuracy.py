"""Measure the time and the operations until an evaluation first meets a goal, beside peers.

python benchmarks/time_to_accuracy.py --datasets mnist --data path/to/data
python benchmarks/time_to_accuracy.py --data path/to/data --bert-checkpoint path/to/checkpoint \
    --seeds 0 1 2
python benchmarks/time_to_accuracy.py --show            # the tables and the picture once more

The recipes run with their default flags. The peers are textbook loops in PyTorch and Accelerate,
and HF Trainer, with the settings that their documentation gives;
`benchmarks/accuracy/workloads.py` names each source.

Each run is a command of its own with empty caches. Its time begins with the command, so it has
imports, preparation of the data, training and all evaluations. Both sides evaluate the same split
after each epoch. Where it is test, the first meeting of a goal is a figure of this benchmark: no
model and no setting is chosen by it. A peer ends when it has met all goals, and a recipe at its own
end.

A peer that would take hours is measured for a few updates and one evaluation. Its time is computed:
these rates, times the epochs that are published, or that the same training took at a higher speed.

Each finished run is written into the file of results. The same command, started again, goes on with
the runs that are missing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import REPOSITORY
from benchmarks.harness.fresh_code import printed_by
from benchmarks.harness.materials import use_own_cache

if TYPE_CHECKING:
    from benchmarks.accuracy.results import FinishedRun, Results
    from benchmarks.accuracy.workloads import Peer, Recipe, Workload

RESULTS = REPOSITORY / "benchmarks" / "results" / "time-to-accuracy.json"
PICTURE = REPOSITORY / "docs" / "time-to-accuracy.svg"
DatasetName = Literal["mnist", "cifar10", "sst2", "mrpc", "digits"]


@dataclass(kw_only=True)
class Options:
    """Measure the time to an accuracy, of the recipes and of their peers."""

    datasets: tuple[DatasetName, ...] = ("mnist", "cifar10", "sst2", "mrpc")
    """Data sets to train on; digits is built in and serves to try this script."""
    contestants: tuple[str, ...] = ()
    """Names of contestants as the table has them (default: all)."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; each contestant runs once with each."""
    data: Path | None = None
    """Folder with mnist/, cifar10/, sst2/ and mrpc/ as the Hub lays them out."""
    bert_checkpoint: Path | None = None
    """Folder of the BERT checkpoint that both sides fine-tune."""
    output: Path = RESULTS
    """File of results; finished runs in it are kept."""
    picture: Path = PICTURE
    """Picture to draw, as .svg or .png."""
    keep_runs: Path | None = None
    """Folder for the summary.json and metrics.jsonl of the recipes' runs."""
    to_the_end: bool = False
    """Let peers train all their epochs, also after they have met all goals."""
    updates: int | None = None
    """Train for so many updates only, to try this script; needs another --output."""
    show: bool = False
    """Measure nothing; print the tables of the results, and draw the picture."""

    def __post_init__(self) -> None:
        """Refuse what would fail only after measuring, or spoil the file of results."""
        if self.picture.suffix not in (".svg", ".png"):
            raise SystemExit(f"error: --picture {self.picture}: the name must end in .svg or .png")
        if self.updates is not None and self.output == RESULTS:
            raise SystemExit(
                "error: --updates only tries the script: pass another --output as well"
            )
        if self.updates is not None and self.updates < 1:
            raise SystemExit("error: --updates takes 1 or more")
        if not self.show and {"sst2", "mrpc"} & {*self.datasets} and self.bert_checkpoint is None:
            raise SystemExit(
                "error: sst2 and mrpc need --bert-checkpoint FOLDER; without it, leave them out of "
                "--datasets"
            )


def main(options: Options) -> None:
    """Run what is missing, and show all results."""
    use_own_cache()
    from benchmarks.accuracy.results import Results

    earlier = Results.read(options.output)
    if options.show:
        if earlier is None:
            raise SystemExit(f"error: there is no file {options.output}: measure first")
        show(earlier, options.picture)
        return
    results = Results(options.output, measure_machine_apart())
    if earlier is not None:
        earlier.require_machine(results.machine)
        results.runs = earlier.runs
    measure(options, results)
    show(results, options.picture)


def measure(options: Options, results: Results) -> None:
    """Run each contestant with each seed, unless a run with the same settings is in the results.

    The contestants take turns, so that a change of the machine's speed affects all alike.
    """
    from benchmarks.accuracy.launch import Conditions, run_contestant, settings_of
    from benchmarks.accuracy.materials import make_materials
    from benchmarks.accuracy.report import table_of

    conditions = Conditions(
        checkpoint=checkpoint_of(options),
        keep_runs=options.keep_runs,
        to_the_end=options.to_the_end,
        most_updates=options.updates,
    )
    chosen = chosen_contestants(options)
    materials = {workload.name: make_materials(workload, options.data) for workload, _ in chosen}
    for seed in options.seeds:
        for workload, contestant in chosen:
            key = (workload.name, contestant.name, seed)
            title = f"{workload.name}, {contestant.name}, seed {seed}"
            if results.has(key, settings_of(workload, contestant, conditions)):
                print(f"{title}: kept", flush=True)
                continue
            print(f"{title} ...", flush=True)
            run = run_contestant(workload, contestant, seed, materials[workload.name], conditions)
            results.runs[run.key] = run
            results.write(table_of(results))
            print(f"  {outcome(workload, run, results)}", flush=True)


def chosen_contestants(options: Options) -> list[tuple[Workload, Recipe | Peer]]:
    """Return the contestants of all chosen data sets.

    Raises:
        SystemExit: a name of `--contestants` fits none of them.
    """
    from benchmarks.accuracy.workloads import WORKLOADS

    everyone = [
        (WORKLOADS[name], contestant)
        for name in options.datasets
        for contestant in WORKLOADS[name].contestants
    ]
    names = [contestant.name for _, contestant in everyone]
    unknown = [name for name in options.contestants if name not in names]
    if unknown:
        raise SystemExit(
            f"error: --contestants {unknown[0]!r}: pass one of {', '.join(dict.fromkeys(names))}"
        )
    chosen_names = options.contestants or names
    return [
        (workload, contestant)
        for workload, contestant in everyone
        if contestant.name in chosen_names
    ]


def checkpoint_of(options: Options) -> Path | None:
    """Return the checkpoint's absolute folder; None if there is none.

    Raises:
        SystemExit: the folder has no config.json.
    """
    if options.bert_checkpoint is None:
        return None
    folder = options.bert_checkpoint.resolve()
    if not (folder / "config.json").is_file():
        raise SystemExit(
            f"error: --bert-checkpoint {options.bert_checkpoint} has no config.json: pass the "
            "folder of a checkpoint"
        )
    return folder


def outcome(workload: Workload, run: FinishedRun, results: Results) -> str:
    """Return in words when a run met each goal."""
    entries = results.evaluations(workload, run)
    parts = []
    for goal in workload.goals:
        met = goal.first_met(entries)
        if met is None:
            best = goal.best(entries)
            best_words = "" if best is None else f", best {best:.2%}"
            parts.append(f"{goal.title}: not met{best_words}")
        else:
            computed = ", computed" if run.trial is not None else ""
            parts.append(f"{goal.title}: {met.seconds:.1f} s{computed}")
    return "; ".join(parts)


def measure_machine_apart() -> dict[str, Any]:
    """Return the machine's facts and rates, measured in a process of its own."""
    code = (
        "import json; from benchmarks.harness import results, roofs; "
        "print(json.dumps(results.describe_machine(roofs.measure_machine())))"
    )
    facts: dict[str, Any] = json.loads(printed_by(code).splitlines()[-1])
    return facts


def show(results: Results, picture: Path) -> None:
    """Print the table for a terminal and for `peers.md`, and draw the picture."""
    from benchmarks.accuracy.picture import draw
    from benchmarks.accuracy.report import as_markdown, as_text, caption, rows_of

    rows = rows_of(results)
    print(as_text(rows))
    print(caption(results))
    print()
    print(as_markdown(rows))
    draw(results, picture)
    print(f"\nwritten: {results.file.name}, {picture.name}")


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Options))
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues with the missing runs")
