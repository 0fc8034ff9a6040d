"""Read what runs left behind: in their own directories, or at W&B.

W&B's projects are read through wandb 0.31's public `Api`, tested with a stand-in for it: no
account was at hand to try it with.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import read_json_if_there, read_lines
from common.objective import PREFIXES, Objective
from common.standing import present_status
from common.track.names import STEP, Facts, unflat

TOO_LARGE = 1e100  # for a chart
LARGEST_COUNT = 2**53  # as an integer, which a chart takes for one of 64 bits


@dataclass(frozen=True)
class RunRecord:
    """What one run left behind; what it did not leave is empty."""

    name: str
    source: str  # its folder, or its address at W&B
    facts: Facts  # as in `config.json`
    rows: list[dict[str, float]]  # as in `metrics.jsonl`: one a step, in order
    summary: Mapping[str, float]  # as in `summary.json`; empty where the run did not get that far
    status: str  # running, stopped, finished, preempted or failed
    reason: str | None = None  # why it was preempted or failed
    objective: Objective = field(init=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "objective", Objective.parse(str(self.fact("objective"))))
        except UserError as problem:
            what = f"{self.source}/config.json is not what a recipe wrote"
            raise UserError(f"{what}: {problem.message}") from None

    def fact(self, path: str) -> Any:
        """Return what `config.json` has at a path such as ``data.name``; None if there is none."""
        value: Any = self.facts
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def flags(self) -> Facts:
        flags = self.fact("config")
        return flags if isinstance(flags, Mapping) else {}

    @property
    def splits(self) -> tuple[str, str]:
        """The splits, keys of `PREFIXES`, evaluated during training and at its end."""
        found = [split for split in PREFIXES if self.fact(f"data.sizes.{split}") is not None]
        return (found[0], found[-1]) if found else ("validation", "validation")

    @property
    def goal(self) -> str:
        """The objective's metric as it is logged during training."""
        return f"{PREFIXES[self.splits[0]]}/{self.objective.metric}"

    @property
    def last_step(self) -> int:
        return int(self.rows[-1][STEP]) if self.rows else 0

    def values(self, metric: str) -> list[float]:
        return [row[metric] for row in self.rows if metric in row]


def numbers(values: Facts) -> dict[str, float]:
    return {
        name: value if abs(value) < LARGEST_COUNT else float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < TOO_LARGE
    }


def merge_rows(rows: Iterable[Facts]) -> list[dict[str, float]]:
    """Return one row a step, in order; of one replayed by a resumed run, the later values."""
    merged: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for row in map(numbers, rows):
        if STEP in row:
            merged[row[STEP]] |= row
    return [merged[step] for step in sorted(merged)]


def read_runs(sources: Sequence[str]) -> list[RunRecord]:
    """Read runs of directories or W&B; those of one name are told apart by where they are."""
    runs = [run for source in sources for run in read_source(source)]
    times = Counter(run.name for run in runs)
    return [replace(run, name=run.source) if times[run.name] > 1 else run for run in runs]


def read_source(source: str) -> list[RunRecord]:
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        files = sorted(path.glob("*.wandb"))
        return [read_offline(files[0]) if files else read_directory(path)]
    if path.suffix == ".wandb" and os.path.isfile(path):
        return [read_offline(path)]
    if os.path.exists(path):
        raise UserError(f"{source} is a file: pass the run's directory that holds it")
    if re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", source):
        return read_project(source)
    raise UserError(
        f"{source} is no run: there is no such folder. Pass a run's directory such as runs/NAME, "
        "a wandb/offline-run-* folder, or entity/project at W&B"
    )


def read_directory(path: Path) -> RunRecord:
    read_json_if_there(path / "status.json")  # a damaged one is a mistake to be told
    told = present_status(path)
    status, reason = str(told.get("status", "running")), told.get("reason")
    facts = read_json_if_there(path / "config.json")
    if facts is None and told:
        why = f"it {status} before training began" + (f": {reason}" if reason else "")
        raise UserError(f"{path} has nothing to compare: {why}")
    if facts is None:
        held = len([*path.glob("*/config.json")])
        hint = f"; it holds {held} runs: pass them, as in {path}/*" if held else ""
        raise UserError(f"{path} is no run: it has no config.json{hint}")
    # A run that goes on again may still have the summary of its first end, a missed target.
    ended = status in ("finished", "failed")
    summary = numbers(read_json_if_there(path / "summary.json") or {}) if ended else {}
    rows = merge_rows(read_lines(path / "metrics.jsonl", STEP))
    run = RunRecord(path.resolve().name, str(path), facts, rows, summary, status, reason)
    return replace(run, name=str(run.flags.get("run_name") or run.name))


def read_offline(file: Path) -> RunRecord:
    """Read a `wandb/offline-run-*` folder by the only reader that comes with wandb 0.31."""
    printed = []
    for flags in (["--summary"], []):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(file)]
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
        if answer.returncode or not answer.stdout.strip():
            said = answer.stderr.strip().splitlines() or ["it is empty"]
            raise UserError(f"{file} can't be read as a W&B run: {said[-1]}")
        printed.append(answer.stdout)
    told, records = json.loads(printed[0]), map(json.loads, printed[1].splitlines())
    history = (record["history"]["item"] for record in records if record["type"] == "history")
    name, source = str(told["name"] or told["run_id"]), str(file.parent)
    return record_of(name, source, told["config"], history, told["summary"], told["state"])


@contextmanager
def asking_wandb(what_failed: str, advice: str) -> Iterator[None]:
    """Turn the lack of a key or server, and a refusal, into a sentence."""
    import wandb

    from common.track.trackers import wandb_mode

    try:
        mode, reason = wandb_mode()
        if mode != "online":
            raise UserError(f"{what_failed}: {reason}. {advice}")
        yield
    except (wandb.Error, ValueError, OSError) as problem:
        message = str(problem).strip() or type(problem).__name__
        raise UserError(f"{what_failed}: {message.splitlines()[0]}") from None


def read_project(address: str) -> list[RunRecord]:
    """Read the runs of a W&B project, oldest first, or a single one."""
    import wandb

    advice = "W&B's projects need an account; their wandb/offline-run-* folders need none"
    with asking_wandb(f"{address} is no folder here, and W&B can't give it", advice):
        api, alone = wandb.Api(timeout=20), address.count("/") == 2
        runs = [api.run(address)] if alone else api.runs(address, order="+created_at")
        records = [
            record_of(
                *(run.name or run.id, "/".join(run.path), run.config, run.scan_history()),
                *(run.summary_metrics, run.state.lower()),
            )
            for run in runs
            if "objective" in run.config  # a project may hold others
        ]
    if not records:
        raise UserError(f"W&B's {address} has no run of these recipes")
    return records


def record_of(
    name: str, source: str, config: Facts, history: Iterable[Facts], summary: Facts, state: str
) -> RunRecord:
    """Return a run as W&B knows it in the form of a run's own directory."""
    named = ({n: v for n, v in row.items() if "/" in n} for row in history)  # no other is ours
    rows, reason = merge_rows(named), None
    # The end of a run's own summary: W&B keeps one of the latest values while a run goes on.
    ended = numbers(summary) if "time/total_seconds" in summary else {}
    status = state if state in ("finished", "running", "preempted") else "failed"
    if status == "finished" and not ended:
        status, reason = "preempted", "its summary was never written"
    elif status == "failed":  # killed, and crashed: what has not said goodbye
        reason = f"W&B calls it {state} after update {rows[-1][STEP] if rows else 0:g}"
    return RunRecord(name, source, unflat(config), rows, ended, status, reason)
