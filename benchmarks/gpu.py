"""Measure the recipes on a GPU, the most valuable figures first. It has not run on a GPU yet.

python benchmarks/gpu.py --data FOLDER --output FOLDER
python benchmarks/gpu.py --data FOLDER --output FOLDER --resume     # goes on where it was cut off
python benchmarks/gpu.py --only resnet50 cifar10 --budget-minutes 8 --output FOLDER
python benchmarks/gpu.py --tiny --output FOLDER                     # on any machine: does it run?

The order is that of `STEPS` in `gpu_steps.py`: a smoke test, ResNet-50, MNIST, BERT-base, CIFAR-10,
a profile, kill and resume, the other GPU tests, then each recipe in every precision.

Each step is a process with a time limit. It writes STEP.json as it measures, and prints into
STEP.log; `table.md` sums all steps up. A step that fails is noted with its error, and the next one
begins.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu_session.steps import STEPS
from benchmarks.harness.recipe_side import REPOSITORY

LEAST_SECONDS = 20  # that a step is begun with
ERROR_CHARACTERS = 4000  # of the log's end, kept with a step that failed
# Key in a recipe's figures, format, and whether its ratio to fp32's is shown.
COLUMNS = {
    "samples/s": ("samples_per_second", ",.0f", False),
    "× fp32": ("samples_per_second", ".2f", True),
    "MFU": ("perf/mfu", ".1%", False),
    "peak MiB": ("memory/peak_allocated_mib", ",.0f", False),
    "of fp32": ("memory/peak_allocated_mib", ".2f", True),
    "kernels run": ("kernel_share", ".0%", False),
    "last loss": ("train/loss", ".3f", False),
}
TROUBLES = ("refused", "waits", "failed")  # of a recipe in one precision
Record = dict[str, Any]


@dataclass(kw_only=True)
class Options:
    """Measure the recipes on this machine's GPU, the most valuable figures first."""

    only: tuple[str, ...] = ()
    """Steps to take, again if need be (default: all)."""
    resume: bool = False
    """Go on in a folder that has results: take the steps that are not done."""
    budget_minutes: float = 55
    """Minutes after which no step is begun, and a running one is ended."""
    data: Path | None = None
    """Folder with mnist/, cifar10/ and sst2/ as the Hub lays them out; else random images."""
    tokenizer: Path | None = None
    """Folder with BERT's tokenizer, as in any checkpoint of it (default: one made here)."""
    rounds: int = 3
    """Rounds in which contestants take turns; a ratio is the median over rounds."""
    output: Path = Path("gpu-results")
    """Folder for the results."""
    tiny: bool = False
    """Take every step at the smallest size, on any machine, to see that it runs."""


def take(name: str, options: Options, seconds: float) -> Record:
    """Take one step in a process group of its own, within so many seconds; return its record."""
    file = (options.output / f"{name}.json").resolve()
    if file.exists():
        file.replace(file.with_suffix(".previous.json"))
    began = time.monotonic()
    status = run_step(name, file, options, seconds)
    record = read_record(file)
    record |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if status != "done":
        log = file.with_suffix(".log").read_text(errors="replace")
        record["error"] = log[-ERROR_CHARACTERS:]
    write_record(file, record)
    return record


def run_step(name: str, file: Path, options: Options, seconds: float) -> str:
    """Run a step's process to its end or its limit; return "done", "failed" or "ended after …"."""
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            step_command(name, file, options),
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return "done" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def step_command(name: str, file: Path, options: Options) -> list[str]:
    """Return the command of a step's process."""
    step_options = {
        "data": str(options.data.resolve()) if options.data else None,
        "tokenizer": str(options.tokenizer.resolve()) if options.tokenizer else None,
        "rounds": 1 if options.tiny else options.rounds,
        "tiny": options.tiny,
    }
    return [
        *(sys.executable, "-m", "benchmarks.gpu_session.steps"),
        *(name, str(file), json.dumps(step_options)),
    ]


def read_record(file: Path) -> Record:
    """Return what a step has written; nothing if it wrote nothing."""
    return json.loads(file.read_text()) if file.exists() else {}


def write_record(file: Path, record: Record) -> None:
    """Write a step's record, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    os.replace(part, file)


def missing_packages(name: str) -> list[str]:
    """Return the packages that a step needs and this environment lacks."""
    return [
        package for package in STEPS[name].packages if importlib.util.find_spec(package) is None
    ]


def table(records: dict[str, Record]) -> str:
    """Return the results as Markdown: the goals, the precisions, and how each step ended."""
    lines = [*goal_rows(records), "", *cell_rows(records), "", *step_rows(records)]
    if any(record.get("tiny") for record in records.values()):
        lines += ["", "A tiny run, to see that it runs: its figures mean nothing."]
    machines = [record["machine"] for record in records.values() if "machine" in record]
    if machines:
        for part in ("hardware", "versions"):
            facts = machines[0][part].items()
            lines += ["", ", ".join(f"{name} {value}" for name, value in facts)]
    return "\n".join(lines) + "\n"


def goal_rows(records: dict[str, Record]) -> list[str]:
    """Return a table of the figures that there is a goal for, with the spread over rounds."""
    lines = ["| | | goal | |", "|---|--:|--:|---|"]
    outcomes = {None: "", True: "reached", False: "**missed**"}
    for record in records.values():
        for row in record.get("goals", []):
            ratio = row.get("ratio")
            spread = f" ({ratio['least']:.3g}–{ratio['most']:.3g})" if ratio else ""
            outcome = outcomes[row["reached"]]
            lines.append(
                f"| {row['title']} | {row['value']:.4g}{spread} | {row['goal']} | {outcome} |"
            )
    return lines


def cell_rows(records: dict[str, Record]) -> list[str]:
    """Return a table of each recipe in each precision."""
    lines = [f"| | {' | '.join(COLUMNS)} | |", f"|---|{'--:|' * len(COLUMNS)}---|"]
    cells: dict[str, Record] = {}
    for record in records.values():
        cells |= {name: figures or {} for name, figures in record.get("figures", {}).items()}
    for name, figures in cells.items():
        troubles = [f"{kind}: {last_line(figures[kind])}" for kind in TROUBLES if kind in figures]
        if "samples_per_second" in figures or troubles:
            full = cells.get(f"{name.split()[0]} fp32", {})
            shown = [shown_figure(figures, full, *column) for column in COLUMNS.values()]
            lines.append(f"| {name} | {' | '.join(shown)} | {'; '.join(troubles)} |")
    return lines


def shown_figure(figures: Record, full: Record, key: str, form: str, is_ratio: bool) -> str:
    """Return a figure for people, or its ratio to that of fp32; nothing where it is unknown."""
    if key not in figures or (is_ratio and key not in full):
        return ""
    return format(figures[key] / full[key] if is_ratio else figures[key], form)


def step_rows(records: dict[str, Record]) -> list[str]:
    """Return a table of how each step ended."""
    rows = [
        f"| {name} | {record['status']} | {record['seconds']} |" for name, record in records.items()
    ]
    return ["| step | | seconds |", "|---|---|--:|", *rows]


def last_line(text: str) -> str:
    """Return the last line of an error."""
    return text.strip().splitlines()[-1][:160].replace("|", "/")


def refuse(options: Options) -> None:
    """Exit with a sentence if the options name unknown steps, or would overwrite results."""
    if unknown := {*options.only} - {*STEPS}:
        raise SystemExit(f"--only {' '.join(unknown)}: the steps are {', '.join(STEPS)}")
    has_results = any((options.output / f"{name}.json").exists() for name in STEPS)
    if has_results and not (options.resume or options.only):
        advice = "pass --resume to go on there, --only to repeat steps, or another --output"
        raise SystemExit(f"{options.output} has results: {advice}")


def main(options: Options) -> int:
    """Take the steps; return how many are not done."""
    refuse(options)
    options.output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.budget_minutes
    records: dict[str, Record] = {}
    for name, plan in STEPS.items():
        record = read_record(options.output / f"{name}.json")
        is_due = name in options.only if options.only else record.get("status") != "done"
        if is_due:
            seconds = min(plan.seconds, ends - time.monotonic())
            record = take_or_leave(name, options, seconds, record)
        if record:
            records[name] = {"seconds": 0, "status": "ended early", **record}
        (options.output / "table.md").write_text(table(records))
    print((options.output / "table.md").read_text())
    return sum(record["status"] != "done" for record in records.values())


def take_or_leave(name: str, options: Options, seconds: float, record: Record) -> Record:
    """Take a step if there is time and all that it needs; return its record."""
    if missing := missing_packages(name):
        return record | {"status": f"needs {' and '.join(missing)}, which this machine lacks"}
    if seconds < LEAST_SECONDS:
        return record or {"status": "no time was left"}
    print(f"{name}: up to {seconds:.0f} s", flush=True)
    record = take(name, options, seconds)
    print(f"{name}: {record['status']}, {record['seconds']} s", flush=True)
    return record


if __name__ == "__main__":
    import tyro

    # So that a request to stop ends the running step, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(tyro.cli(Options)))
