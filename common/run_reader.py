"""Read what runs left behind: in their own directories, or at W&B."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.run_record import RunRecord, merge_rows
from common.wandb_reader import is_address, read_offline, read_project


def read_runs(sources: Sequence[str]) -> list[RunRecord]:
    """Read runs, and give each a name of its own.

    Args:
        sources: run directories, W&B's offline folders, or ``entity/project[/run]`` at W&B.
    Raises:
        UserError: naming the first source that is none of these, or can't be read.
    """
    return with_unique_names([run for source in sources for run in read_source(source)])


def read_source(source: str) -> list[RunRecord]:
    """Read one run, or all of a W&B project; see `read_runs`."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.wandb"))
        return [read_offline(files[0]) if files else read_directory(path)]
    if path.suffix == ".wandb" and path.is_file():
        return [read_offline(path)]
    if path.exists():
        raise UserError(f"{source} is a file: pass the run's directory that holds it")
    if is_address(source):
        return read_project(source)
    raise UserError(
        f"{source} is no run: there is no such folder. Pass a run's directory such as runs/NAME, "
        "a wandb/offline-run-* folder, or entity/project at W&B"
    )


def read_directory(path: Path) -> RunRecord:
    """Read the directory that a recipe wrote.

    Raises:
        UserError: when it is none, or a file in it is damaged.
    """
    status = read_object(path / "status.json")
    facts = read_object(path / "config.json")
    if facts is None:
        if status is not None:
            raise UserError(
                f"{path} has nothing to compare: it {status.get('status')} before training began"
                + (f": {status['reason']}" if status.get("reason") else "")
            )
        held = sorted(child.parent.name for child in path.glob("*/config.json"))
        raise UserError(
            f"{path} is no run: it has no config.json"
            + (f"; it holds {len(held)} runs: pass them, as in {path}/*" if held else "")
        )
    status = status or {"status": "running"}
    # A run that goes on again may still have the summary of its first end, a missed target.
    ended = status.get("status") in ("finished", "failed")
    return RunRecord(
        name=facts.get("config", {}).get("run_name") or path.resolve().name,
        source=str(path),
        facts=facts,
        rows=merge_rows(read_lines(path / "metrics.jsonl")),
        summary=(read_object(path / "summary.json") or {}) if ended else {},
        status=str(status.get("status")),
        reason=status.get("reason"),
    )


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no such file.

    Raises:
        UserError: when the file is damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=not_a_number)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} can't be read ({type(problem).__name__}): {problem}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not what a recipe wrote: it holds no object")
    return value


def read_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    """Yield the objects of a file with one a line; its last line may be only half written."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                value = json.loads(line, parse_constant=not_a_number)
            except ValueError:
                return  # a run that is being written, or was killed
            if isinstance(value, dict):
                yield value


def not_a_number(name: str) -> None:
    """Read NaN and infinities as missing: JSON has no words for them, though Python writes some."""


def with_unique_names(runs: list[RunRecord]) -> list[RunRecord]:
    """Tell runs of one name apart: by their folder's parent, or else by a number."""
    counts = Counter(run.name for run in runs)
    named = [
        replace(run, name="/".join(Path(run.source).parts[-2:])) if counts[run.name] > 1 else run
        for run in runs
    ]
    counts, seen = Counter(run.name for run in named), Counter[str]()
    for index, run in enumerate(named):
        seen[run.name] += 1
        if counts[run.name] > 1:
            named[index] = replace(run, name=f"{run.name} ({seen[run.name]})")
    return named
