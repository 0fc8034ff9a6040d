"""Measure the recipes on a GPU, the most valuable figures first.

python benchmarks/gpu.py --data FOLDER --output FOLDER
python benchmarks/gpu.py --data FOLDER --output FOLDER --resume     # continue after a cut
python benchmarks/gpu.py --only resnet50 speedrun --budget-minutes 8 --output FOLDER
python benchmarks/gpu.py --tiny --output FOLDER                     # on any machine: does it run?

The order is that of `STEPS` in `gpu_session/steps.py`: a smoke test, the CIFAR-10 speedrun,
ResNet-50, BERT-base, MNIST, ResNet-18 on CIFAR-10, kill and resume, the other GPU tests, proofs, a
profile, ResNet-50 and each recipe in every precision, BERT-large, and copies between host and GPU.

Each step is a process with a time limit. It writes STEP.json while it measures, and prints into
STEP.log; `table.md` sums up all steps. If a step fails, its error is kept and the next step begins.
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

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import REPOSITORY
from benchmarks.gpu_session.steps import STEPS
from benchmarks.harness.result_file import write_results
from benchmarks.harness.text_tables import markdown_table

MIN_SECONDS = 20  # with less time left, no step begins
ERROR_CHARACTERS = 4000  # of the log's end, kept with a failed step
LINE_CHARACTERS = 160  # of an error in the table
# Keys under which the figures of a recipe in one precision name a problem.
PROBLEMS = ("refused", "waits", "failed")
Record = dict[str, Any]  # a step's JSON file; see `gpu_session/step.py`


@dataclass(frozen=True)
class Column:
    """A column of the table of recipes."""

    key: str  # in a recipe's figures
    format: str
    is_ratio_to_fp32: bool = False


COLUMNS = {
    "samples/s": Column("samples_per_second", ",.0f"),
    "× fp32": Column("samples_per_second", ".2f", is_ratio_to_fp32=True),
    "MFU": Column("perf/mfu", ".1%"),
    "peak MiB": Column("memory/peak_allocated_mib", ",.0f"),
    "of fp32": Column("memory/peak_allocated_mib", ".2f", is_ratio_to_fp32=True),
    "kernels run": Column("kernel_share", ".0%"),
    "last loss": Column("train/loss", ".3f"),
}


@dataclass(kw_only=True)
class Options:
    """Measure the recipes on this machine's GPU, the most valuable figures first."""

    only: tuple[str, ...] = ()
    """Steps to run, even if they are done (default: all)."""
    resume: bool = False
    """Continue in a folder that has results: run the steps that are not done."""
    budget_minutes: float = 55
    """Minutes after which a running step is ended and no other begins."""
    data: Path | None = None
    """Folder with mnist/, cifar10/ and sst2/ as the Hub lays them out (default: other data)."""
    tokenizer: Path | None = None
    """Folder with BERT's tokenizer, as in any of its checkpoints (default: one trained here)."""
    rounds: int = 3
    """Rounds in which contestants take turns; a ratio is the median over rounds."""
    output: Path = Path("gpu-results")
    """Folder for the results."""
    tiny: bool = False
    """Run every step at the smallest size, on any machine, to see that it works."""


def run_and_record(name: str, options: Options, seconds: float) -> Record:
    """Run a step for at most `seconds`, and return its record with status, time and error."""
    file = (options.output / f"{name}.json").resolve()
    if file.exists():
        file.replace(file.with_suffix(".previous.json"))
    began = time.monotonic()
    status = run_step(name, file, options, seconds)
    record = read_step_record(file)
    record |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if status != "done":
        log = file.with_suffix(".log").read_text(errors="replace")
        record["error"] = log[-ERROR_CHARACTERS:]
    write_results(file, record)
    return record


def run_step(name: str, file: Path, options: Options, seconds: float) -> str:
    """Run a step's process and its children to the end or the limit.

    Returns:
        "done", "failed" or "ended after … s".
    """
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
        name,
        str(file),
        json.dumps(step_options),
    ]


def read_step_record(file: Path) -> Record:
    """Return the record that a step has written; an empty one if there is none."""
    return json.loads(file.read_text()) if file.exists() else {}


def missing_packages(name: str) -> list[str]:
    """Return the packages that a step needs and this environment lacks."""
    return [
        package for package in STEPS[name].packages if importlib.util.find_spec(package) is None
    ]


def table(records: dict[str, Record]) -> str:
    """Return the results as Markdown: the goals, the recipes, and the status of each step."""
    lines = [*goal_rows(records), "", *recipe_rows(records), "", *step_rows(records)]
    if any(record.get("tiny") for record in records.values()):
        lines += ["", "A tiny run, to see that everything works: its figures mean nothing."]
    machines = [record["machine"] for record in records.values() if "machine" in record]
    if machines:
        for part in ("hardware", "versions"):
            facts = machines[0][part].items()
            lines += ["", ", ".join(f"{name} {value}" for name, value in facts)]
    return "\n".join(lines) + "\n"


def goal_rows(records: dict[str, Record]) -> list[str]:
    """Return the table of figures with a goal, with their spread over rounds."""
    rows = [["", "", "goal", ""]]
    outcomes = {None: "", True: "reached", False: "**missed**"}
    for record in records.values():
        for row in record.get("goals", []):
            ratio = row.get("ratio")
            spread = f" ({ratio['least']:.3g}–{ratio['most']:.3g})" if ratio else ""
            outcome = outcomes[row["reached"]]
            rows.append([row["title"], f"{row['value']:.4g}{spread}", f"{row['goal']}", outcome])
    return markdown_table(rows, "lrrl")


def recipe_rows(records: dict[str, Record]) -> list[str]:
    """Return the table of each recipe in each precision."""
    rows = [["", *COLUMNS, ""]]
    all_figures: dict[str, Record] = {}
    for record in records.values():
        for name, figures in record.get("figures", {}).items():
            all_figures[name] = figures or {}
    for name, figures in all_figures.items():
        problems = [f"{key}: {last_line(figures[key])}" for key in PROBLEMS if key in figures]
        if "samples_per_second" in figures or problems:
            fp32_figures = all_figures.get(f"{name.split()[0]} fp32", {})
            cells = [cell(column, figures, fp32_figures) for column in COLUMNS.values()]
            rows.append([name, *cells, "; ".join(problems)])
    return markdown_table(rows, "l" + "r" * len(COLUMNS) + "l")


def cell(column: Column, figures: Record, fp32_figures: Record) -> str:
    """Return a figure, or its ratio to that of fp32, as text; empty if it is unknown."""
    if column.key not in figures:
        return ""
    value = figures[column.key]
    if column.is_ratio_to_fp32:
        if column.key not in fp32_figures:
            return ""
        value /= fp32_figures[column.key]
    return format(value, column.format)


def step_rows(records: dict[str, Record]) -> list[str]:
    """Return the table of each step's status and time."""
    rows = [["step", "", "seconds"]]
    for name, record in records.items():
        rows.append([name, record["status"], f"{record['seconds']}"])
    return markdown_table(rows, "llr")


def last_line(text: str) -> str:
    """Return the last line of an error, as a cell of a table."""
    return text.strip().splitlines()[-1][:LINE_CHARACTERS].replace("|", "/")


def refuse_mistakes(options: Options) -> None:
    """Exit with a sentence if the options name unknown steps or would overwrite results."""
    unknown = set(options.only) - set(STEPS)
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: the steps are {', '.join(STEPS)}")
    has_results = any((options.output / f"{name}.json").exists() for name in STEPS)
    if has_results and not (options.resume or options.only):
        raise SystemExit(
            f"{options.output} has results: "
            "pass --resume to go on there, --only to repeat steps, or another --output"
        )


def main(options: Options) -> int:
    """Run the steps, and return how many are not done."""
    refuse_mistakes(options)
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.budget_minutes
    records: dict[str, Record] = {}
    for name, plan in STEPS.items():
        record = read_step_record(options.output / f"{name}.json")
        is_due = name in options.only if options.only else record.get("status") != "done"
        if is_due:
            seconds = min(plan.seconds, deadline - time.monotonic())
            record = run_if_possible(name, options, seconds, record)
        if record:
            records[name] = {"seconds": 0, "status": "ended early", **record}
        (options.output / "table.md").write_text(table(records))
    print((options.output / "table.md").read_text())
    return sum(record["status"] != "done" for record in records.values())


def run_if_possible(name: str, options: Options, seconds: float, record: Record) -> Record:
    """Run a step if there is time and all its packages are installed.

    Args:
        record: of an earlier attempt; empty if there was none.

    Returns:
        The step's record, or `record` with the reason why the step did not run.
    """
    missing = missing_packages(name)
    if missing:
        return record | {"status": f"needs {' and '.join(missing)}, which this machine lacks"}
    if seconds < MIN_SECONDS:
        return record or {"status": "no time was left"}
    print(f"{name}: up to {seconds:.0f} s", flush=True)
    record = run_and_record(name, options, seconds)
    print(f"{name}: {record['status']}, {record['seconds']} s", flush=True)
    return record


if __name__ == "__main__":
    import tyro

    # A request to stop must end the running step, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(tyro.cli(Options)))
