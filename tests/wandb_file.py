"""Read a W&B run's file back with the reader that comes with W&B."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

from tests.launch import Finished


def records(run: Finished) -> dict[str, Any]:
    """Return what the one W&B run of a launch wrote, by kind of record.

    Returns:
        ``run``: how it presents itself; ``artifact``: by type; ``metric``: definitions by name;
        ``history``: rows; ``summary``: the last values; ``config``.
    """
    (file,) = (run.wandb_folder / "wandb").glob("*run-*/*.wandb")
    found: dict[str, Any] = {"artifact": {}, "history": [], "metric": {}}
    for line in inspect(file).splitlines():
        record = json.loads(line)
        kind = record["type"]
        if kind == "run":
            found["run"] = record["run"]
        elif kind == "artifact":
            found["artifact"].setdefault(record["artifact"]["type"], []).append(record["artifact"])
        elif kind == "metric":
            metric = record["metric"]
            found["metric"][metric.get("name") or metric["glob_name"]] = metric
        elif kind == "history":
            found["history"].append(record["history"]["item"])
    end = json.loads(inspect(file, "--summary"))
    return found | {"summary": end["summary"], "config": end["config"]}


@functools.cache
def inspect(file: object, *flags: str) -> str:
    """Return what `wandb leet inspect` says of the file of a run that ended."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
