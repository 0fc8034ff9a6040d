"""Read a W&B run's file back with the reader that comes with W&B."""

from __future__ import annotations

import functools
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.launch import Finished


def records(run: Finished) -> dict[str, Any]:
    """Return the records of the only W&B run of a launch.

    Returns:
        ``run``: its name, tags and so on; ``artifact``: artifacts by type; ``metric``: definitions
        by name; ``history``: rows; ``summary``: the last values; ``config``: flags and facts.
    """
    (file,) = (run.wandb_folder / "wandb").glob("*run-*/*.wandb")
    contents: dict[str, Any] = {"artifact": {}, "history": [], "metric": {}}
    for line in inspect(file).splitlines():
        record = json.loads(line)
        if record["type"] == "run":
            contents["run"] = record["run"]
        elif record["type"] == "artifact":
            artifact = record["artifact"]
            contents["artifact"].setdefault(artifact["type"], []).append(artifact)
        elif record["type"] == "metric":
            metric = record["metric"]
            contents["metric"][metric.get("name") or metric["glob_name"]] = metric
        elif record["type"] == "history":
            contents["history"].append(record["history"]["item"])
    end = json.loads(inspect(file, "--summary"))
    return contents | {"summary": end["summary"], "config": end["config"]}


@functools.cache
def inspect(file: Path, *flags: str) -> str:
    """Return the output of `wandb leet inspect` for the file of a run that has ended.

    This starts the program that `wandb leet inspect` starts, without a Python process above it.
    `test_compare` reads a file by the command itself, as `recipes compare` does.
    """
    wandb = find_spec("wandb")
    assert wandb is not None
    assert wandb.origin is not None
    program = Path(wandb.origin).with_name("bin") / "wandb-core"
    command = [str(program), "leet", "inspect", "--no-observability", "--json", *flags]
    command += ["--run-file", str(file), str(file.parent.parent)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
