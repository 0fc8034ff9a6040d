"""Read runs from W&B: its offline folders without an account, its projects with one.

`read_project` is written against wandb 0.31's public `Api` and tested with a stand-in for it: no
account was at hand to try it with.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.run_record import RunRecord, merge_rows

# How W&B's states map to ours: it calls killed, and crashed, what has not said goodbye.
STATUSES = {"finished": "finished", "running": "running", "preempted": "preempted"}


def read_offline(file: Path) -> RunRecord:
    """Read one run from the transaction log in a `wandb/offline-run-*` folder.

    It is read by `wandb leet inspect`, the only reader that comes with wandb 0.31.

    Raises:
        UserError: when it can't be read, or is of something else than a recipe.
    """
    described = json.loads(inspect(file, "--summary"))
    records = (json.loads(line) for line in inspect(file).splitlines())
    history = (record["history"]["item"] for record in records if record["type"] == "history")
    name = described["name"] or described["run_id"]
    return record_of(
        name=str(name),
        source=str(file.parent),
        facts=described["config"],
        rows=merge_rows(history),
        summary=described["summary"],
        state=described["state"],
    )


def inspect(file: Path, *flags: str) -> str:
    """Return what `wandb leet inspect --json` prints of a run."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if answer.returncode or not answer.stdout.strip():
        said = answer.stderr.strip().splitlines() or ["it is empty"]
        raise UserError(f"{file} can't be read as a W&B run: {said[-1]}")
    return answer.stdout


def is_address(source: str) -> bool:
    """Whether a word has the form of ``entity/project`` or ``entity/project/run``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", source) is not None


def read_project(address: str) -> list[RunRecord]:
    """Read the runs of a W&B project, oldest first, or a single run, through the public API.

    Raises:
        UserError: without a key or an answer, or when nothing that a recipe wrote is there.
    """
    from common.tracking import wandb_mode

    mode, reason = wandb_mode()
    if mode != "online":
        raise UserError(
            f"{address} is no folder here, and can't be read from W&B: {reason}. Runs of W&B's "
            "projects need an account; their wandb/offline-run-* folders need none"
        )
    import wandb

    try:
        api = wandb.Api(timeout=20)
        if address.count("/") == 2:
            found = [api.run(address)]
        else:
            found = list(api.runs(address, order="+created_at"))
        records = [
            record_of(
                name=run.name or run.id,
                source="/".join(run.path),
                facts=dict(run.config),
                rows=merge_rows(run.scan_history()),
                summary=run.summary_metrics,
                state=run.state.lower(),
            )
            for run in found
            # A project may hold other runs: those are not asked for.
            if "environment" in run.config or len(found) == 1
        ]
    except (wandb.Error, ValueError, OSError) as problem:
        said = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise UserError(f"{address} is no folder here, and W&B can't give it: {said}") from None
    if not records:
        raise UserError(f"W&B's project {address} has no run of these recipes")
    return records


def record_of(
    *,
    name: str,
    source: str,
    facts: Mapping[str, Any],
    rows: list[dict[str, float]],
    summary: Mapping[str, Any],
    state: str,
) -> RunRecord:
    """Return a run as W&B knows it in the form of a run's own directory.

    Raises:
        UserError: when it is of something else than a recipe.
    """
    if "environment" not in facts:
        raise UserError(f"{source} is no run of these recipes: its configuration lacks their facts")
    status, reason = STATUSES.get(state, "failed"), None
    last = rows[-1]["progress/global_step"] if rows else 0
    # The end of a run's own summary: W&B keeps one of the latest values while a run goes on.
    complete = "time/total_seconds" in summary
    if status == "finished" and not complete:
        status, reason = "preempted", "its summary was never written"
    elif status == "failed":
        reason = f"W&B calls it {state} after update {last:g}"
    figures = {key: value for key, value in summary.items() if not key.startswith("_")}
    return RunRecord(name, source, dict(facts), rows, figures if complete else {}, status, reason)
