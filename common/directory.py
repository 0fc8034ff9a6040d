"""A run's directory: `config.json`, `status.json` and what else is written whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from common.errors import UserError, is_main_rank


class RunDirectory:
    """The files of one run; rank 0 alone writes them."""

    def __init__(self, asked: str | None, recipe: str, resume: bool) -> None:
        """Create the directory: `asked`, or one named by recipe and time, chosen by rank 0.

        Args:
            resume: whether the run in it goes on.

        Raises:
            UserError: when it can't be made, or holds a run already, which is kept.
        """
        chosen = [asked or ""]
        if asked is None and is_main_rank():
            chosen = [make_named_by_clock(recipe)]
        broadcast_object_list(chosen)
        self.path = Path(chosen[0])
        self.named_by_clock = asked is None
        if (self.path / "config.json").exists() and not resume:
            raise UserError(
                f"--output-dir {self.path} holds a run, which is kept: name another, or go on "
                "with it by --resume auto"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(f"--output-dir {self.path} can't be made: {problem}") from None

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a JSON file whole, on rank 0: a reader never meets half of one."""
        if is_main_rank():
            write_whole(self.path / name, json.dumps(value, indent=2) + "\n")

    def write_status(self, status: str, global_step: int, reason: str | None = None) -> None:
        """Say in `status.json` how the run stands, for supervisors.

        ``resumable`` is false where starting again would end in the same way.
        """
        resumable = status in ("running", "preempted")
        value = {"status": status, "resumable": resumable, "reason": reason}
        self.write("status.json", value | {"global_step": global_step})

    def write_failure(self, global_step: int, reason: str, resumable: bool) -> bool:
        """Say in `status.json` why the run failed; return whether this rank was the first to."""
        path = self.path / "status.json"
        try:
            if json.loads(path.read_text())["status"] == "failed":
                return False
        except (OSError, ValueError, KeyError):
            pass
        value = {"status": "failed", "resumable": resumable, "reason": reason}
        write_whole(path, json.dumps(value | {"global_step": global_step}, indent=2) + "\n")
        return True

    def cut_metrics(self, last_step: int) -> list[dict[str, Any]]:
        """Cut `metrics.jsonl` back to `last_step`, on rank 0, and return what is left."""
        path = self.path / "metrics.jsonl"
        if not is_main_rank() or not path.exists():
            return []
        kept = []
        for line in path.read_text().splitlines():
            try:
                values = json.loads(line)
            except ValueError:  # half a line, written when the run was killed
                break
            if values["progress/global_step"] > last_step:
                break
            kept.append(values)
        write_whole(path, "".join(json.dumps(values) + "\n" for values in kept))
        return kept

    def remove_if_unused(self) -> None:
        """Remove a directory that was named by the clock, if the run ended before it began."""
        names = {path.name for path in self.path.glob("*")}
        if is_main_rank() and self.named_by_clock and names == {"status.json"}:
            (self.path / "status.json").unlink()
            self.path.rmdir()


def make_named_by_clock(recipe: str) -> str:
    """Make a directory under `runs/` that no other run has, and return its path.

    Raises:
        UserError: when it can't be made.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = Path(f"runs/{recipe}-{stamp}" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                continue
            raise UserError(f"{path.parent} is a file: no run can be written there") from None
        except OSError as problem:
            raise UserError(f"{path} can't be made: {problem}") from None
        return str(path)
    raise AssertionError


def write_whole(path: Path, text: str) -> None:
    """Replace a text file by a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def json_safe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what JSON has no word for: NaN and infinities become null."""
    return {
        name: None if isinstance(value, float) and value - value != 0 else value
        for name, value in values.items()
    }
