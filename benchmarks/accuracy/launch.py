"""Starts a contestant as a command of its own with empty caches, and reads what it wrote down."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.accuracy.materials import Materials
from benchmarks.accuracy.records import read_evaluations, read_facts
from benchmarks.accuracy.results import FinishedRun, Settings
from benchmarks.accuracy.workloads import Peer, Recipe, Workload
from common.system.git import commit_of_library
from common.tools.reproduce.publishing import publish_if_possible

SCRIPTS = REPOSITORY / "benchmarks" / "accuracy"
TAIL = 3000  # characters from the end of a failed command's output


@dataclass(frozen=True)
class Conditions:
    """What all contestants of an invocation have in common."""

    checkpoint: Path | None
    keep_runs: Path | None  # folder to publish the recipes' runs in
    to_the_end: bool
    most_updates: int | None  # to try the script out


def settings_of(workload: Workload, contestant: Recipe | Peer, conditions: Conditions) -> Settings:
    """Return all that a contestant's figures depend on, besides its seed and the machine."""
    settings: Settings = {"updates": conditions.most_updates}
    if workload.data_type == "text" and conditions.checkpoint is not None:
        settings["checkpoint"] = conditions.checkpoint.name
    if isinstance(contestant, Recipe):
        return settings | {
            "recipe": contestant.recipe,
            "flags": list(contestant.flags),
            "code": digest_of_code(REPOSITORY / "recipes" / f"{contestant.recipe}.py"),
        }
    settings |= {"training": asdict(contestant.settings), "source": contestant.source}
    if contestant.epochs_from is not None:
        settings["epochs_from"] = asdict(contestant.epochs_from)
    return settings


def digest_of_code(file: Path) -> str:
    """Return a digest of a recipe that ignores its docstring, comments and layout."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def run_contestant(
    workload: Workload,
    contestant: Recipe | Peer,
    seed: int,
    materials: Materials,
    conditions: Conditions,
) -> FinishedRun:
    """Run a contestant once.

    Raises:
        SystemExit: its command failed; with the end of its output.
    """
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if isinstance(contestant, Recipe):
            run_recipe(workload, contestant, seed, materials, conditions, folder)
        else:
            run_peer(workload, contestant, seed, materials, conditions, folder)
        facts = read_facts(folder)
        evaluations = read_evaluations(folder)
    return FinishedRun(
        workload=workload.name,
        contestant=contestant.name,
        seed=seed,
        settings=settings_of(workload, contestant, conditions),
        repeat=repeating_commands(workload, contestant, seed),
        evaluations=evaluations,
        forward=facts.forward,
        trial=facts.trial,
        git_commit=commit_of_library(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average_before=round(load_average, 2),
    )


def run_recipe(
    workload: Workload,
    contestant: Recipe,
    seed: int,
    materials: Materials,
    conditions: Conditions,
    folder: Path,
) -> None:
    """Run a recipe; the directory of its run is `folder`/run."""
    recipe = REPOSITORY / "recipes" / f"{contestant.recipe}.py"
    flags = ["--dataset", materials.dataset, "--seed", str(seed), *contestant.flags]
    if workload.data_type == "text":
        flags += ["--model", str(conditions.checkpoint)]
    if conditions.most_updates is not None:
        flags += ["--max-steps", str(conditions.most_updates)]
    flags += ["--tracker", "none", "--output-dir", str(folder / "run")]
    script = str(SCRIPTS / "recipe_run.py")
    began = repr(time.time())
    run_command([sys.executable, script, str(folder), began, str(recipe), *flags], folder)
    if conditions.keep_runs is not None:
        publish_if_possible(
            folder / "run", kept_folder(conditions.keep_runs, workload, contestant, seed)
        )


def run_peer(
    workload: Workload,
    contestant: Peer,
    seed: int,
    materials: Materials,
    conditions: Conditions,
    folder: Path,
) -> None:
    """Run a peer; see `peer_run.Request`."""
    request = {
        "folder": str(folder),
        "workload": workload.name,
        "contestant": contestant.name,
        "seed": seed,
        "is_trial": contestant.epochs_from is not None and conditions.most_updates is None,
        "to_the_end": conditions.to_the_end,
        "arrays": materials.arrays,
        "train_files": materials.train_files,
        "evaluated_files": materials.evaluated_files,
        "checkpoint": str(conditions.checkpoint or ""),
        "most_updates": conditions.most_updates,
        "began": time.time(),
    }
    run_command([sys.executable, str(SCRIPTS / "peer_run.py"), json.dumps(request)], folder)


def run_command(command: list[str], folder: Path) -> None:
    """Run a command with empty caches in `folder`.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "huggingface"),
    }
    with (folder / "output.log").open("w+", encoding="utf-8") as output:
        finished = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        output.seek(0)
        printed = output.read()
    if finished.returncode != 0:
        raise SystemExit(
            f"error: {command[1]} ended with status {finished.returncode}:\n{printed[-TAIL:]}"
        )


def repeating_commands(workload: Workload, contestant: Recipe | Peer, seed: int) -> list[str]:
    """Return the commands that repeat a run, with placeholders for this machine's folders."""
    words = ["python", "benchmarks/time_to_accuracy.py", "--datasets", workload.name]
    words += ["--contestants", contestant.name, "--seeds", str(seed)]
    dataset = workload.name
    if workload.name != "digits":
        words += ["--data", "path/to/data"]
        dataset = f"path/to/data/{workload.name}"
    model = []
    if workload.data_type == "text":
        words += ["--bert-checkpoint", "path/to/checkpoint"]
        model = ["--model", "path/to/checkpoint"]
    commands = [shlex.join(words)]
    if isinstance(contestant, Recipe):
        recipe = ["python", f"recipes/{contestant.recipe}.py", "--dataset", dataset]
        commands.append(shlex.join([*recipe, "--seed", str(seed), *contestant.flags, *model]))
    return commands


def kept_folder(keep_runs: Path, workload: Workload, contestant: Recipe, seed: int) -> Path:
    """Return the folder to publish a run in."""
    name = re.sub(r"[^a-z0-9]+", "-", contestant.name.lower()).strip("-")
    return keep_runs / workload.name / name / f"seed-{seed}"
