"""Finished checkpoints: listed, verified, chosen from, and removed when newer ones are whole."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from common.console import say, warn
from common.errors import UserError
from common.files import SUPERSEDED, UNFINISHED, read_json, receipt_of, remove, signed, writing

NAME = re.compile(r"step-(\d{8,})")
# The best model so far, of what update; of one in shards, the rows of one rank.
BEST = re.compile(r"best-(\d{8,})(-\d+-of-\d+)?\.safetensors$")
MANIFEST = "manifest.json"


def step_folders(folder: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first, damaged ones among them."""
    found = (path for path in folder.glob("step-*") if NAME.fullmatch(path.name))
    return sorted(found, key=step_of)


def step_of(checkpoint: Path | str) -> int:
    found = NAME.fullmatch(Path(checkpoint).name)
    if found is None:
        raise UserError(f"{checkpoint} is no checkpoint's name: pass one such as step-00000120")
    return int(found[1])


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; a `UserError` where it is missing or not one."""
    manifest = read_json(checkpoint / MANIFEST)
    with contextlib.suppress(KeyError, TypeError, AttributeError, RecursionError):  # of other forms
        groups = [manifest["parts"], *manifest["ranks"], *manifest["files"].values()]
        is_whole = manifest == signed(manifest) and manifest["ranks"]
        if is_whole and all(isinstance(one, dict) for one in groups):
            return manifest
    raise UserError(f"{checkpoint / MANIFEST} is damaged: it is not what was written")


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None where it is whole."""
    try:
        receipts = read_manifest(checkpoint)["files"]
    except UserError as error:
        return error.message
    for name, receipt in receipts.items():
        path = Path(os.path.normpath(checkpoint / name))
        try:
            found = receipt_of(path)
        except OSError as problem:
            return f"{path} can't be read: {problem.strerror}"
        if found["size"] != receipt.get("size"):
            return f"{path} has {found['size']:,} bytes instead of {receipt.get('size')}"
        if found["sha256"] != receipt.get("sha256"):
            return f"{path} is not what was written: its SHA-256 differs"
    return None


def newest_whole(folder: Path, named: str | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint up to a named one, and what is wrong with later ones."""
    problems: list[str] = []
    last = None if named is None else step_of(named)
    for checkpoint in reversed(step_folders(folder)):
        if last is None or step_of(checkpoint) <= last:
            problem = damage(checkpoint)
            if problem is None:
                return checkpoint, problems
            problems.append(problem)
    return None, problems


def choose(folder: Path, named: str | None) -> Path | None:
    """Clean up, and return the newest whole checkpoint up to a `named` one, if there is one.

    A damaged one is passed over and named. What is newer is put aside until another one is whole,
    and what was not finished is removed.
    """
    path, problems = newest_whole(folder, named)
    for problem in problems:
        warn(f"checkpoint passed over: {problem}")
    with writing(str(folder)):
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            remove(unfinished)
        for newer in step_folders(folder):
            if path is None or step_of(newer) > step_of(path):
                aside = newer.with_name(newer.name + SUPERSEDED)
                say(f"put aside, until another checkpoint is whole: {aside}")
                remove(aside)
                os.rename(newer, aside)
    return path


def remove_old(folder: Path, keep: int) -> None:
    """Leave the newest checkpoints, and of the best models those that they name."""
    for old in [*step_folders(folder)[:-keep], *folder.glob(f"*{SUPERSEDED}")]:
        remove(old)
    named, whole = set[str](), step_folders(folder)
    for checkpoint in whole:
        with contextlib.suppress(UserError):  # one that is damaged needs nothing
            named |= {Path(name).name for name in read_manifest(checkpoint)["files"]}
    for path in folder.iterdir():
        best = BEST.match(path.name)  # another rank's may be newer
        if best and path.name not in named and int(best[1]) < step_of(whole[-1]):
            remove(path)
