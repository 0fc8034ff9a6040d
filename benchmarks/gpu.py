"""All that is to be known of the recipes on a GPU, in one command of 25 minutes at most.

python benchmarks/gpu.py --data FOLDER --output FOLDER
python benchmarks/gpu.py --only resnet50 cifar10 --budget-minutes 8 --output FOLDER
python benchmarks/gpu.py --tiny --output FOLDER     # on any machine: does it run to its end?

In order of worth: the GPU tests; each recipe in fp16, bf16, tf32 and fp32, then compiled, with
waits for the device in its loop as errors; kill and resume; `--profile`; ResNet-50 at 224 in each
precision and against timm; BERT-base and -large against HF Trainer; MNIST against the textbook
loop; CIFAR-10 to 94 %; transfer bandwidth. Each step is a process of its own with a time limit,
which writes what it has found at once: STEP.json, what it printed in STEP.log, and of all of them
table.md. One that fails is noted, and the next goes on. The same command, given again, takes the
steps that the folder does not have yet. Nothing of it has run on a GPU so far.
"""

from __future__ import annotations

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

from benchmarks.gpu_steps import STEPS
from benchmarks.recipe_side import REPOSITORY

LEAST_SECONDS = 20  # that a step is begun with
# Key in a recipe's figures, form, and whether its ratio to fp32's is shown.
COLUMNS = {
    "samples/s": ("samples_per_second", ",.0f", False),
    "× fp32": ("samples_per_second", ".2f", True),
    "MFU": ("perf/mfu", ".1%", False),
    "peak MiB": ("memory/peak_allocated_mib", ",.0f", False),
    "of fp32": ("memory/peak_allocated_mib", ".2f", True),
    "GPU busy": ("gpu/utilization", ".0%", False),
    "last loss": ("train/loss", ".3f", False),
}
TROUBLES = ("refused", "waits", "failed")  # of a recipe in one precision


@dataclass(kw_only=True)
class Options:
    """Measure the recipes on this machine's GPU, the most worthy first."""

    only: tuple[str, ...] = ()
    """Steps to take, again if need be (default: all that the folder does not have)."""
    budget_minutes: float = 25
    """After which nothing is begun, and what runs is ended."""
    data: Path | None = None
    """Folder with mnist/, cifar10/ and sst2/ as the Hub lays them out; else random images."""
    tokenizer: Path | None = None
    """Folder with BERT's tokenizer, as in any checkpoint of it (default: one made here)."""
    rounds: int = 3
    """Rounds in which contestants take turns; a ratio is the median over rounds."""
    output: Path = Path("gpu-results")
    """Folder for what is found."""
    tiny: bool = False
    """Everything as small as can be, on any machine, to see that it runs."""


def take(name: str, options: Options, seconds: float) -> dict[str, Any]:
    """Take one step in a process group of its own, within so many seconds; return its record."""
    file = (options.output / f"{name}.json").resolve()
    file.unlink(missing_ok=True)
    folders = {key: getattr(options, key) for key in ("data", "tokenizer")}
    paths = {key: str(path.resolve()) if path else None for key, path in folders.items()}
    asked = {**paths, "rounds": 1 if options.tiny else options.rounds, "tiny": options.tiny}
    began, status = time.monotonic(), "failed"
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_steps", name, str(file), json.dumps(asked)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = "done" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = f"ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    record = json.loads(file.read_text()) if file.exists() else {}
    record |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if status != "done":
        record["said"] = file.with_suffix(".log").read_text(errors="replace")[-2000:]
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def table(records: dict[str, dict[str, Any]]) -> str:
    """Return what was found as Markdown: the goals, the precisions, and how each step ended."""
    lines = ["| | | goal | |", "|---|--:|--:|---|"]
    for record in records.values():
        for row in record.get("goals", []):
            spread = row.get("ratio", {})
            ends = f" ({spread['least']:.3g}–{spread['most']:.3g})" if spread else ""
            reached = {None: "", True: "reached", False: "**missed**"}[row["reached"]]
            lines.append(
                f"| {row['title']} | {row['value']:.4g}{ends} | {row['goal']} | {reached} |"
            )
    cells = {n: f or {} for one in records.values() for n, f in one.get("figures", {}).items()}
    lines += ["", f"| | {' | '.join(COLUMNS)} | |", f"|---|{'--:|' * len(COLUMNS)}---|"]
    for name, found in cells.items():
        troubles = [f"{kind}: {said_last(found[kind])}" for kind in TROUBLES if kind in found]
        if "samples_per_second" in found or troubles:
            full = cells.get(f"{name.split()[0]} fp32", {})
            shown = [
                format(found[key] / full[key] if shares else found[key], form)
                if key in found and (key in full or not shares)
                else ""
                for key, form, shares in COLUMNS.values()
            ]
            lines.append(f"| {name} | {' | '.join(shown)} | {'; '.join(troubles)} |")
    lines += ["", "| step | | seconds |", "|---|---|--:|"]
    lines += [f"| {name} | {one['status']} | {one['seconds']} |" for name, one in records.items()]
    if any(record.get("tiny") for record in records.values()):
        lines += ["", "A tiny run, to see that it runs: its figures mean nothing."]
    machines = [one["machine"] for one in records.values() if "machine" in one]
    for part in ("hardware", "versions") if machines else ():
        lines += ["", ", ".join(f"{name} {value}" for name, value in machines[0][part].items())]
    return "\n".join(lines) + "\n"


def said_last(text: str) -> str:
    """Return the last line of what an error said."""
    return text.strip().splitlines()[-1][:160].replace("|", "/")


def main(options: Options) -> int:
    """Take the steps; return how many have not come to their end."""
    if unknown := {*options.only} - {*STEPS}:
        raise SystemExit(f"--only {' '.join(unknown)}: the steps are {', '.join(STEPS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.budget_minutes
    records: dict[str, dict[str, Any]] = {}
    for name, (_, limit) in STEPS.items():
        file, left = options.output / f"{name}.json", ends - time.monotonic()
        known = json.loads(file.read_text()) if file.exists() else {}
        is_asked = name in options.only if options.only else known.get("status") != "done"
        if is_asked and left >= LEAST_SECONDS:
            print(f"{name}: {left / 60:.1f} minutes are left", flush=True)
            known = take(name, options, min(left, limit))
            print(f"{name}: {known['status']}, {known['seconds']} s", flush=True)
        if known or is_asked:
            records[name] = known or {"status": "no time was left", "seconds": 0}
        (options.output / "table.md").write_text(table(records))
    print((options.output / "table.md").read_text())
    return sum(record["status"] != "done" for record in records.values())


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options)))
