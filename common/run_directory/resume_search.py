"""Finds the run that `--resume` means: by its path, or the newest unfinished one."""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import UserError
from common.run_directory.effective_batch import Config, ResumableConfig
from common.run_directory.records import CHECKPOINTS_FOLDER, CONFIG, STATUS, SUMMARY
from common.run_directory.run_to_resume import read_run_if_possible
from common.run_directory.saved_flags import (
    differing_flags,
    fixed_flags,
    saved_flags_in_words,
    values_in,
)
from common.run_directory.status import read_status
from common.storage.files import LOCK, locked
from common.system.platforms.commands import quoted
from common.system.wording import listed


def directory_to_resume(
    parse: Callable[[Config], Config],
    new_run_defaults: Config,
    resume: str,
    output_dir: str | None,
    recipe: str,
) -> Path | None:
    """Return the directory of the run to go on with; None if `--resume auto` finds no run.

    With `--output-dir`, `--resume auto` means the run in that directory. Otherwise, `--resume auto`
    means the newest unfinished run in `runs/`. See `resumed_config` for the arguments.
    """
    if resume != "auto":
        return run_of(Path(resume), output_dir)
    if output_dir is None:
        return newest_unfinished(parse(new_run_defaults), recipe)
    directory = Path(output_dir)
    return directory if os.path.exists(directory / CONFIG) else None


def run_of(path: Path, output_dir: str | None) -> Path:
    """Return the run directory for a path to a run or to one of its checkpoints.

    A checkpoint is two levels below its run's directory: runs/NAME/checkpoints/step-00000120.

    Raises:
        UserError: `output_dir` names another directory, or the path is not that of a run that can
            be resumed. The message says why.
    """
    candidates = (path, path.parent.parent) if os.path.isdir(path) else ()
    for directory in candidates:
        if os.path.isfile(directory / CONFIG):
            here = os.path.realpath(directory)
            if output_dir is not None and os.path.realpath(output_dir) != here:
                raise UserError(
                    f"--resume {path} continues the run in its own directory, {directory}, so "
                    "--output-dir can't name another one",
                    advice="leave --output-dir out",
                )
            return directory
    for directory in candidates:
        if os.path.isdir(directory / CHECKPOINTS_FOLDER):
            raise UserError(
                f"--resume {path} is not possible, because {directory} contains checkpoints but "
                "no config.json",
                advice="put the run's config.json back into this directory, or start a new run",
            )
    if os.path.isfile(path / STATUS):
        raise UserError(
            f"--resume {path} is not possible, because that run has not begun to train",
            advice=(
                "wait if it is still preparing its data; otherwise repeat the command that "
                "started it"
            ),
        )
    problem = "is neither the directory of a run nor a checkpoint"
    if not os.path.exists(path):
        problem = "does not exist"
    raise UserError(
        f"--resume {path} {problem}",
        advice="pass the directory of a run, such as runs/NAME",
    )


def newest_unfinished(config: ResumableConfig, recipe: str) -> Path | None:
    """Return the newest unfinished run in `runs/` that was started with the flags of this command.

    The result is None if there is no unfinished run that the user could mean. The command then
    begins a new run.

    Raises:
        UserError: there are only unfinished runs that were started with other flags, or whose
            `config.json` was edited. Without this error, the command would begin a new run, and the
            user might not notice.
    """
    # Unfinished runs that this command can't continue: see `refuse_to_begin_again`.
    with_other_flags: list[tuple[Path, list[str]]] = []
    edited: list[tuple[Path, UserError]] = []
    for path in sorted(Path("runs").glob(f"*/{CONFIG}"), key=os.path.getmtime, reverse=True):
        directory = path.parent
        run = read_run_if_possible(directory, type(config), recipe)
        if run is None or run.is_finished():
            continue
        if run.stored.edited_config_error is not None:
            edited.append((directory, run.stored.edited_config_error))
            continue
        saved_flags = fixed_flags(type(config), run.given_flags)
        differences = differing_flags(saved_flags, values_in(config, saved_flags))
        if not differences:
            return directory
        phrases = saved_flags_in_words(type(config), differences)
        with_other_flags.append((directory, phrases))
    refuse_to_begin_again(edited, with_other_flags)
    return None


def refuse_to_begin_again(
    edited: Iterable[tuple[Path, UserError]],
    with_other_flags: Iterable[tuple[Path, list[str]]],
) -> None:
    """Raise a `UserError` if the user may mean an unfinished run that this command can't continue.

    Args:
        edited: the runs whose `config.json` was edited, each with its error.
        with_other_flags: the runs that were started with other flags, each with these flags.
    """
    for directory, error in edited:
        if may_be_meant(directory):
            raise error
    for directory, phrases in with_other_flags:
        if may_be_meant(directory):
            raise UserError(
                f"--resume auto found the unfinished run {directory}, which was started with "
                f"{listed(phrases)}",
                advice=(
                    f"pass --resume {quoted(directory)}, which needs no other flags, or pass the "
                    "same flags with --resume auto, or start another run with --output-dir NEW"
                ),
            )


def may_be_meant(directory: Path) -> bool:
    """Whether a user may mean this unfinished run by `--resume auto`, although it has other flags.

    If so, `refuse_to_begin_again` raises an error, so that no new run begins silently. A user can't
    mean a run that another job is writing, or one that was trained to its end and missed its
    `--target`. The latter has the status "failed", and a summary.
    """
    if read_status(directory).status == "failed" and (directory / SUMMARY).exists():
        return False
    # `locked` raises a `UserError` if another job holds the lock, because it is writing to the run.
    with contextlib.suppress(UserError), locked(directory / LOCK, timeout=0):
        return True
    return False
