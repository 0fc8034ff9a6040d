"""Finished checkpoints: listed, verified, chosen from, and removed when newer ones are whole."""

import contextlib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoints.tensors import read_metadata
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


def owner_of(checkpoint: Path) -> str | None:
    """Return the identity of the run that wrote a checkpoint, if its manifest says it."""
    with contextlib.suppress(UserError):
        run_id = read_manifest(checkpoint).get("run_id")
        return run_id if isinstance(run_id, str) else None
    return None


def is_of_another_run(checkpoint: Path, run_id: str | None) -> bool:
    """Whether a checkpoint says that another run wrote it; those of older versions say nothing."""
    return run_id is not None and owner_of(checkpoint) not in (None, run_id)


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None where it is whole.

    The best model so far does not count: training goes on without it. See `damaged_best`.
    """
    try:
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return error.message
    step, receipts = manifest.get("global_step"), manifest["files"]
    if isinstance(step, int) and step != step_of(checkpoint):
        right = f"step-{step:08d}"
        return f"{checkpoint} was renamed, and is of update {step}: rename it to {right}"
    needed = {name: receipt for name, receipt in receipts.items() if not is_best(name)}
    return damage_of_files(checkpoint, needed)


def damaged_best(checkpoint: Path) -> str | None:
    """Return what is wrong with the best model that a whole checkpoint names; None if nothing."""
    receipts = read_manifest(checkpoint)["files"]
    return damage_of_files(checkpoint, {name: receipts[name] for name in receipts if is_best(name)})


def is_best(name: str) -> bool:
    """Whether a file that a manifest names holds a best model, or one rank's rows of it."""
    return BEST.fullmatch(Path(name).name) is not None


def damage_of_files(checkpoint: Path, receipts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return how the first file that differs from its receipt does; None where none does."""
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


def newest_whole(
    folder: Path, named: str | None = None, run_id: str | None = None
) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint up to a named one, and what is wrong with later ones.

    Where `run_id` is given, a checkpoint of another run counts as a damaged one.
    """
    problems: list[str] = []
    last = None if named is None else step_of(named)
    for checkpoint in reversed(step_folders(folder)):
        if last is not None and step_of(checkpoint) > last:
            continue
        problem = damage(checkpoint)
        if problem is None and is_of_another_run(checkpoint, run_id):
            problem = f"{checkpoint} was written by another run"
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    return None, problems


def choose(folder: Path, named: str | None, run_id: str | None = None) -> Path | None:
    """Clean up, and return the newest whole checkpoint up to a `named` one, if there is one.

    A damaged one, or one of another run than `run_id`, is passed over and named. What is newer is
    put aside until another checkpoint is whole, and what was not finished is removed. What another
    run wrote is put aside for good. So is everything where no checkpoint is whole: a user may be
    able to mend it.

    Raises:
        UserError: when no checkpoint up to the named one is whole; nothing has changed then.
    """
    undo_renaming(folder)
    path, problems = newest_whole(folder, named, run_id)
    if path is None and named is not None and step_folders(folder):
        what = f"no checkpoint up to {named} is whole ({problems[0] if problems else 'none'})"
        raise UserError(f"{what}: go on with the newest one by --resume {folder.parent}")
    for problem in problems:
        warn(f"checkpoint passed over: {problem}")
    with writing(str(folder)):
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            remove(unfinished)
        if path is None and step_folders(folder):
            put_all_aside(folder)
        put_other_runs_aside(folder, run_id)
        for newer in step_folders(folder):
            if path is not None and step_of(newer) > step_of(path):
                aside = newer.with_name(newer.name + SUPERSEDED)
                say(f"put aside, until another checkpoint is whole: {aside}")
                remove(aside)
                os.rename(newer, aside)
    return path


def undo_renaming(folder: Path) -> None:
    """Give a checkpoint that was renamed its own name again, where that is free."""
    for checkpoint in step_folders(folder):
        with contextlib.suppress(UserError, OSError):
            step = read_manifest(checkpoint).get("global_step")
            right = folder / f"step-{step:08d}" if isinstance(step, int) else checkpoint
            if right != checkpoint and not os.path.lexists(right):
                say(f"{checkpoint} is of update {step}: renamed to {right.name}")
                os.rename(checkpoint, right)


def put_all_aside(folder: Path) -> None:
    """Rename a folder of checkpoints of which none can be used."""
    aside = free_name(folder.with_name(f"{folder.name}-put-aside"))
    say(f"put aside, and kept: {aside}")
    os.rename(folder, aside)


def put_other_runs_aside(folder: Path, run_id: str | None) -> None:
    """Move what another run wrote into a folder of its own, where it is as usable as before."""
    foreign = [path for path in step_folders(folder) if is_of_another_run(path, run_id)]
    for path in folder.glob("*.safetensors"):
        if run_id is not None and read_metadata(path).get("run_id") not in (None, run_id):
            foreign.append(path)
    if not foreign:
        return
    aside = free_name(folder / "of-another-run")
    aside.mkdir()
    for path in foreign:
        say(f"put aside, for it is of another run: {aside / path.name}")
        os.rename(path, aside / path.name)


def free_name(path: Path) -> Path:
    """Return a path, or that with a number after it, where nothing lies yet."""
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    candidates = (path.with_name(name) for name in names)
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def remove_old(folder: Path, keep: int, newest: Path, run_id: str | None = None) -> None:
    """Leave the newest checkpoints of a run, and of its best models those that they name.

    Args:
        newest: the checkpoint that was just written, the last of the `keep` that stay.
        run_id: whose checkpoints may be removed; None stands for any run's.
    """
    last = step_of(newest)
    own = [
        path
        for path in step_folders(folder)
        if step_of(path) < last and not is_of_another_run(path, run_id)
    ]
    for old in [*own[: max(0, len(own) - (keep - 1))], *folder.glob(f"*{SUPERSEDED}")]:
        remove(old)
    named = set[str]()
    for checkpoint in step_folders(folder):
        with contextlib.suppress(UserError):  # one that is damaged needs nothing
            named |= {Path(name).name for name in read_manifest(checkpoint)["files"]}
    for path in folder.iterdir():
        best = BEST.match(path.name)
        is_old = best is not None and path.name not in named and int(best[1]) < last
        if is_old and (run_id is None or read_metadata(path).get("run_id") in (None, run_id)):
            remove(path)
