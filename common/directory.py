"""A run's directory: `config.json`, `status.json` and what else is written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from common.errors import LETTING_GO, UserError, is_main_rank, let_main_rank_exit_first

LOCK = ".lock"
# Seconds to wait for another job to leave: as long as one may take to save after a signal.
PATIENCE = 60.0


class RunDirectory:
    """The files of one run; rank 0 alone writes them."""

    def __init__(self, asked: str | None, recipe: str, resume: bool) -> None:
        """Create the directory: `asked`, or one named by recipe and time, chosen by rank 0.

        Args:
            resume: whether the run in it goes on.

        Raises:
            UserError: on all ranks, when it can't be made or written, holds a run already, which
                is kept, or is in use by another job.
        """
        self.named_by_clock = asked is None
        self.lock: FileLock | None = None
        chosen: list[Any] = [None, None]
        if is_main_rank():
            try:
                self.path = make_directory(asked, recipe, resume)
                self.lock = locked(self.path)
                if resume:  # what an earlier attempt ended by says nothing of this one
                    self.write_status("running", read_status(self.path).get("global_step", 0))
                chosen = [str(self.path), None]
            except UserError as error:
                chosen = [None, error.message]
        broadcast_object_list(chosen)
        path, mistake = chosen
        if mistake is not None:
            time.sleep(LETTING_GO)
            let_main_rank_exit_first()
            raise UserError(mistake)
        self.path = Path(path)

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
        if read_status(self.path).get("status") == "failed":
            return False
        value = {"status": "failed", "resumable": resumable, "reason": reason}
        text = json.dumps(value | {"global_step": global_step}, indent=2) + "\n"
        # Where the disk is full, the reason is printed all the same.
        with contextlib.suppress(OSError):
            write_whole(self.path / "status.json", text)
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
        if is_main_rank() and self.named_by_clock and names <= {"status.json", LOCK}:
            shutil.rmtree(self.path)

    def release(self) -> None:
        """Let other jobs have the directory."""
        if self.lock is not None:
            self.lock.release()


def make_directory(asked: str | None, recipe: str, resume: bool) -> Path:
    """Make a run's directory; see `RunDirectory`."""
    if asked is None:
        return Path(make_named_by_clock(recipe))
    path = Path(asked)
    if (path / "config.json").exists() and not resume:
        raise UserError(
            f"--output-dir {path} holds a run, which is kept: name another, or go on with it by "
            "--resume auto"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / LOCK).touch()
    except OSError as problem:
        raise UserError(f"--output-dir {path} can't be made or written: {problem}") from None
    return path


def locked(path: Path, patience: float = PATIENCE) -> FileLock | None:
    """Take a run's directory for this job alone, until it ends in whatever way.

    Returns:
        None where the file system knows no locks.
    Raises:
        UserError: when another job keeps it.
    """
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise UserError(
            f"another job writes to {path}: wait for its end, or name another --output-dir"
        ) from None
    except (NotImplementedError, OSError):
        return None
    return lock


def read_status(path: Path) -> dict[str, Any]:
    """Return what a run's `status.json` holds; nothing where it is missing or damaged."""
    try:
        value = json.loads((path / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def refuse_to_resume(path: Path, reason: str) -> None:
    """Say in the status of an unfinished run that the command given can't go on with it.

    Or a supervisor that starts the command again until the run is done would do so for ever.
    """
    status = read_status(path)
    if not is_main_rank() or status.get("status") in (None, "finished"):
        return
    try:
        lock = locked(path, patience=0)
    except UserError:  # it is running, by another command
        return
    value = {"status": "failed", "resumable": False, "reason": reason}
    write_whole(path / "status.json", json.dumps(status | value, indent=2) + "\n")
    if lock is not None:
        lock.release()


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
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_safe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what JSON has no word for: NaN and infinities become null."""
    return {
        name: None if isinstance(value, float) and value - value != 0 else value
        for name, value in values.items()
    }
