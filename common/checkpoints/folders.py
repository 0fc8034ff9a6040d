"""Lists, verifies and chooses the finished checkpoints of a run, and removes old ones."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from common.checkpoints.tensors import read_metadata, receipt_of
from common.console import say, warn
from common.errors import UserError
from common.failures.sentences import writing
from common.run_directory.identity import may_be_of_run
from common.run_directory.records import MANIFEST, Manifest, Receipt
from common.storage.digests import is_as_signed
from common.storage.files import SUPERSEDED, UNFINISHED, remove
from common.storage.json_files import PUT_BACK, read_json
from common.system.platforms.commands import quoted
from common.system.platforms.files import rename_path

NAME = re.compile(r"step-(\d{8,})")  # the folder of a finished checkpoint, with its update
# The best model so far, with its update; if the model is sharded, one rank's rows of it.
BEST = re.compile(r"best-(\d{8,})(-\d+-of-\d+)?\.safetensors$")
OF_ANOTHER_RUN = "of-another-run"  # a folder beside the checkpoints


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder, by its update; `NAME` matches it."""
    return f"step-{step:08d}"


def best_name(step: int) -> str:
    """Return the name of the best model's file, by its update and without suffix; see `BEST`."""
    return f"best-{step:08d}"


def step_folders(folder: Path) -> list[Path]:
    """Return the folders of all finished checkpoints, oldest first; damaged ones are included."""
    checkpoints = (path for path in folder.glob("step-*") if NAME.fullmatch(path.name))
    return sorted(checkpoints, key=step_of)


def step_of(checkpoint: Path | str) -> int:
    """Return the update that a checkpoint's name states; a `UserError` for any other name."""
    match = NAME.fullmatch(Path(checkpoint).name)
    if match is None:
        raise UserError(
            f"{checkpoint} is not the name of a checkpoint",
            advice="pass the path of a checkpoint, such as runs/NAME/checkpoints/step-00000120",
        )
    return int(match[1])


def read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest; a `UserError` if it is missing or damaged.

    The JSON must match its own digest before it is made into a `Manifest`.
    """
    path = checkpoint / MANIFEST
    contents = read_json(path)
    with contextlib.suppress(RecursionError, ValidationError):  # nested too deeply, or malformed
        if is_as_signed(contents):
            return Manifest.model_validate(contents)
    raise UserError(f"{path} is damaged or was edited", advice=PUT_BACK)


def owner_of(checkpoint: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if its manifest can't be read."""
    with contextlib.suppress(UserError):
        return read_manifest(checkpoint).run_id
    return None


def is_of_another_run(checkpoint: Path, run_id: str) -> bool:
    """Whether another run certainly wrote a checkpoint; False if its manifest can't be read."""
    return not may_be_of_run(owner_of(checkpoint), run_id)


def damage(checkpoint: Path) -> str | None:
    """Return a sentence that names the damaged file of a checkpoint; None if it is whole.

    The best model so far is not checked, because training can go on without it.
    `damage_of_best_model` checks it.
    """
    try:
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return error.problem
    step = manifest.global_step
    if step != step_of(checkpoint):
        return f"{checkpoint} was renamed from {checkpoint_name(step)} (rename it back)"
    needed = {name: receipt for name, receipt in manifest.files.items() if not is_best(name)}
    return damage_of_files(checkpoint, needed)


def damage_of_best_model(checkpoint: Path) -> str | None:
    """Return a sentence that names the damaged file of a checkpoint's best model.

    The result is None if that model is whole, or if the checkpoint names none. The checkpoint must
    be whole: see `damage`.
    """
    receipts = read_manifest(checkpoint).files
    of_best = {name: receipt for name, receipt in receipts.items() if is_best(name)}
    return damage_of_files(checkpoint, of_best)


def is_best(name: str) -> bool:
    """Whether a file in a manifest contains a best model, or one rank's rows of it."""
    return BEST.fullmatch(Path(name).name) is not None


def damage_of_files(checkpoint: Path, receipts: Mapping[str, Receipt]) -> str | None:
    """Return a sentence on the first file that differs from its receipt; None if all are equal.

    Args:
        receipts: the receipts of the files, by path relative to the checkpoint.
    """
    for name, receipt in receipts.items():
        path = Path(os.path.normpath(checkpoint / name))  # without "..", for the message
        try:
            actual = receipt_of(path)
        except OSError as problem:
            return f"{path} can't be read ({problem.strerror})"
        if actual.size != receipt.size:
            return f"{path} has {actual.size:,} bytes instead of {receipt.size:,}"
        if actual.sha256 != receipt.sha256:
            return f"{path} has changed since it was written, because its SHA-256 differs"
    return None


def newest_whole(folder: Path, up_to: str | None, run_id: str) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint, and a sentence on each newer one that can't be used.

    The checkpoint is None if none is whole.

    Args:
        up_to: the name of the newest checkpoint to consider; later ones are ignored, without a
            sentence. None considers all.
        run_id: the run whose checkpoints to consider; another run's checkpoint counts as damaged.
    """
    problems: list[str] = []
    last_step = None if up_to is None else step_of(up_to)
    for checkpoint in reversed(step_folders(folder)):
        if last_step is not None and step_of(checkpoint) > last_step:
            continue
        problem = damage(checkpoint)
        if problem is None and is_of_another_run(checkpoint, run_id):
            problem = f"{checkpoint} was written by another run"
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    return None, problems


def choose_and_clean_up(folder: Path, up_to: str | None, run_id: str) -> Path | None:
    """Return the newest whole checkpoint, and clean up the folder; None if no checkpoint is whole.

    A resume calls this on rank 0, before anything is written.

    A warning names each checkpoint that is passed over, because it is damaged or because it
    does not belong to the run `run_id`. The folder changes as follows:

    - A checkpoint that a user renamed gets its original name.
    - Unfinished files are removed.
    - Checkpoints newer than the chosen one are put aside, and are removed once the run has written
      another checkpoint.
    - Files of another run are moved to a separate folder, and are never removed.
    - If no checkpoint of this run is whole, all of them are put aside, and are never removed: a
      user may be able to repair one.

    Args:
        up_to: the name of the last checkpoint to consider; None considers all.
        run_id: the run to resume.

    Raises:
        UserError: there are checkpoints, but none up to this one is whole. Nothing is removed
            or put aside then.
    """
    undo_renaming(folder)
    path, problems = newest_whole(folder, up_to, run_id)
    if path is None and up_to is not None and step_folders(folder):
        raise no_checkpoint_error(up_to, folder, problems, run_id)
    for problem in problems:
        warn(f"skipped a checkpoint, because {problem}")
    with writing(str(folder)):
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            remove(unfinished)
        put_other_runs_aside(folder, run_id)
        if path is None and step_folders(folder):
            put_all_aside(folder)
        if path is not None:
            put_newer_aside(folder, path)
    return path


def no_checkpoint_error(name: str, folder: Path, problems: list[str], run_id: str) -> UserError:
    """Return the error for a run without a usable checkpoint up to the one of this name."""
    if problems:
        reason = f"no checkpoint up to {name} can be used ({problems[0]})"
    else:
        first_name = step_folders(folder)[0].name
        reason = f"{folder} has no checkpoint up to {name}, because its first one is {first_name}"
    newest, _ = newest_whole(folder, None, run_id)
    resume = f"--resume {quoted(folder.parent)}"
    if newest is None:
        advice = f"restore a checkpoint from a backup; without one, {resume} begins at update 0"
    else:
        advice = f"continue from the newest checkpoint, {newest.name}, with {resume}"
    return UserError(reason, advice=advice)


def put_newer_aside(folder: Path, chosen: Path) -> None:
    """Mark the checkpoints newer than the `chosen` one as superseded.

    There are such checkpoints if they are damaged, or if the user resumes from an earlier one.
    `remove_old` removes them once the resumed run has written a checkpoint.
    """
    for checkpoint in step_folders(folder):
        if step_of(checkpoint) > step_of(chosen):
            aside = checkpoint.with_name(checkpoint.name + SUPERSEDED)
            say(
                f"renamed {checkpoint.name}, which is newer than {chosen.name}, to {aside}; it is "
                "deleted once the run has written another checkpoint"
            )
            remove(aside)
            rename_path(checkpoint, aside)


def undo_renaming(folder: Path) -> None:
    """Give each checkpoint that a user renamed its original name, if no other file has it.

    Under another name, a checkpoint counts as damaged. The manifest states the update, and so the
    name. A checkpoint with a damaged manifest keeps the name that it has.
    """
    for checkpoint in step_folders(folder):
        with contextlib.suppress(UserError, OSError):
            step = read_manifest(checkpoint).global_step
            original = folder / checkpoint_name(step)
            if original != checkpoint and not os.path.lexists(original):
                say(f"renamed {checkpoint} to {original.name}, because it is of update {step}")
                rename_path(checkpoint, original)


def put_all_aside(folder: Path) -> None:
    """Rename a folder whose checkpoints are all damaged, but leave other runs' files in place.

    `put_other_runs_aside` has moved other runs' files to subfolders before. These subfolders stay
    in a new folder with the old name.
    """
    aside = free_name(folder.with_name(f"{folder.name}-put-aside"))
    say(f"all checkpoints in {folder} are damaged, so they were moved to {aside}")
    rename_path(folder, aside)
    for of_another_run in sorted(aside.glob(f"{OF_ANOTHER_RUN}*")):
        folder.mkdir(exist_ok=True)
        rename_path(of_another_run, folder / of_another_run.name)


def put_other_runs_aside(folder: Path, run_id: str) -> None:
    """Move other runs' checkpoints and lasting files to a new subfolder.

    A checkpoint names its lasting files by relative paths. They move together, so these
    checkpoints stay complete.
    """
    foreign = [path for path in step_folders(folder) if is_of_another_run(path, run_id)]
    # The lasting files: best models and frozen weights.
    for path in folder.glob("*.safetensors"):
        if not may_be_of_run(read_metadata(path).get("run_id"), run_id):
            foreign.append(path)
    if not foreign:
        return
    aside = free_name(folder / OF_ANOTHER_RUN)
    aside.mkdir()
    for path in foreign:
        say(f"moved {path.name}, which another run wrote, to {aside / path.name}")
        rename_path(path, aside / path.name)


def free_name(path: Path) -> Path:
    """Return `path`, or if it exists the first free name of `path`-2, `path`-3 and so on."""
    candidate = path
    number = 2
    while os.path.lexists(candidate):
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def remove_old(folder: Path, checkpoints_to_keep: int, newest: Path, run_id: str) -> None:
    """Remove all but the newest checkpoints of a run, and the best models that none of them names.

    Checkpoints that `put_newer_aside` has marked as superseded are removed too.

    Args:
        checkpoints_to_keep: the number of checkpoints that stay, `newest` included.
        newest: the checkpoint that was just written. It stays even if the number is 0.
        run_id: the run whose files may be removed.
    """
    last_step = step_of(newest)
    earlier = [
        path
        for path in step_folders(folder)
        if step_of(path) < last_step and not is_of_another_run(path, run_id)
    ]
    earlier_to_keep = checkpoints_to_keep - 1  # without `newest`
    count_to_remove = max(0, len(earlier) - earlier_to_keep)
    for old in [*earlier[:count_to_remove], *folder.glob(f"*{SUPERSEDED}")]:
        remove(old)
    remove_old_best_models(folder, last_step, run_id)


def remove_old_best_models(folder: Path, last_step: int, run_id: str) -> None:
    """Remove the best models from before `last_step` that no checkpoint names."""
    named_files = set[str]()
    for checkpoint in step_folders(folder):
        with contextlib.suppress(UserError):  # a damaged checkpoint needs no files
            named_files |= {Path(name).name for name in read_manifest(checkpoint).files}
    for path in folder.iterdir():
        best = BEST.match(path.name)
        # Keep a best model of this update or a later one, because the next checkpoint may name it.
        if best is None or path.name in named_files or int(best[1]) >= last_step:
            continue
        if may_be_of_run(read_metadata(path).get("run_id"), run_id):
            remove(path)
