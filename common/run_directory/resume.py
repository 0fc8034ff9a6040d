"""Finds the run that `--resume` means, and checks whether this command may continue it."""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from common.console import say
from common.errors import UserError
from common.flags import from_json
from common.run_directory.directory import INITIAL
from common.run_directory.effective_batch import Config, ResumableConfig, keep_effective_batch
from common.run_directory.excerpts import excerpt_of
from common.run_directory.identity import may_be_of_run
from common.run_directory.records import CHECKPOINTS_FOLDER, CONFIG, STATUS, SUMMARY, Flags
from common.run_directory.saved_flags import (
    differing_flags,
    fixed_flags,
    flags_in_words,
    has_moved,
    saved_flags_in_words,
    values_in,
)
from common.run_directory.status import read_status
from common.run_directory.stored_run import StoredRun
from common.storage.files import LOCK, locked
from common.system.launch_variables import world_size
from common.system.platforms.commands import quoted
from common.system.wording import listed


class RunToResume(NamedTuple):
    """A stored run that a command may resume, with its flags.

    A resume runs inside the recipe, so its flags have the types of the recipe's `Config`. The flags
    in `stored.saved_config` are JSON, because tools read runs of any recipe.
    """

    resolved: dict[str, object]  # the flags, with the values that `auto` chose
    given_flags: dict[str, object]  # the flags as the command line gave them
    stored: StoredRun

    def is_finished(self) -> bool:
        """Whether `status.json` calls the run finished; False if that file is another run's."""
        status = read_status(self.stored.directory)
        return status.status == "finished" and may_be_of_run(
            status.run_id, self.stored.saved_config.run_id
        )

    def refuse_edited_config(self) -> None:
        """Raise a `UserError` if `config.json` was edited, or is another run's."""
        if self.stored.edited_config_error is not None:
            raise self.stored.edited_config_error


def resumed_config(
    config_class: type[Config],
    parse: Callable[[Config], Config],
    new_run_defaults: Config,
    resume: str,
    output_dir: str | None,
    recipe: str,
) -> Config:
    """Return the configuration with which to continue the run that `--resume` means.

    If `--resume auto` finds no run, the result is the configuration of a new run, in which `resume`
    is None.

    Args:
        parse: reads the command line, whose flags override the given defaults.
        new_run_defaults: the defaults of a new run, such as the flags of a `--config` file or the
            recipe's own defaults.
        resume: the value of `--resume`: ``auto``, or the path of a run or of a checkpoint.
        output_dir: the value of `--output-dir`; None if the user named no directory.
        recipe: the recipe's name.

    Raises:
        UserError: the path is not that of a run, the run belongs to another recipe, its
            `config.json` is damaged or was edited, or flags contradict it.
        SystemExit: with status 0, if the run is finished.
    """
    directory = directory_to_resume(parse, new_run_defaults, resume, output_dir, recipe)
    if directory is None:
        if output_dir is None:
            say(f"--resume auto: runs/ contains no unfinished run of {recipe}, so a new run starts")
        return replace(parse(new_run_defaults), resume=None)
    run = read_run(directory, config_class, recipe)
    is_finished = run.is_finished()
    if is_finished and run.stored.edited_config_error is not None:
        # The flags of the run are unknown, so none can contradict them.
        leave_finished_run(directory)
    run.refuse_edited_config()
    defaults = config_class(**run.resolved)
    config = parse(defaults)
    # The flags that a resume can't change get their saved values back below.
    saved_flags = fixed_flags(config_class, run.resolved)
    if has_moved(saved_flags["dataset"], config.dataset):  # fingerprints are compared later
        saved_flags["dataset"] = os.path.abspath(config.dataset)
        config = replace(config, dataset=saved_flags["dataset"])
    refuse_contradictions(config, saved_flags, run, directory, is_finished)
    if is_finished:
        leave_finished_run(directory)
    # Name the run that was found for "auto", or the run or checkpoint that the user named.
    resumed_path = directory if resume == "auto" else Path(resume)
    config = replace(config, **saved_flags, resume=str(resumed_path), output_dir=str(directory))
    return keep_effective_batch(
        config, defaults, run.stored.saved_config.environment.effective_batch_size
    )


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


def refuse_contradictions(
    config: ResumableConfig,
    saved_flags: dict[str, object],
    run: RunToResume,
    directory: Path,
    is_finished: bool,
) -> None:
    """Raise a `UserError` if the command line changes flags that a resume can't change.

    Three values of a flag are accepted:

    - its saved value
    - the value that the first command gave it, because that command may be repeated
    - `auto`, which leaves the choice to the run
    """
    contradictions = differing_flags(
        saved_flags,
        values_in(config, saved_flags),
        given_flags=run.given_flags,
        is_current_auto_fine=True,
    )
    if not contradictions:
        return
    phrases = flags_in_words(contradictions, "{flag} {current} (the run has {saved})")
    if is_finished:
        raise UserError(
            f"{directory} is finished, so no flag can extend or change it, but the command has "
            f"{listed(phrases)}",
            advice=(
                "leave these flags out, or start a new run from its weights with --init-from "
                f"{quoted(directory)} instead of --resume"
            ),
        )
    raise UserError(
        f"can't resume {directory} with {', '.join(phrases)}",
        advice="leave these flags out, or start another run without --resume in another directory",
    )


def leave_finished_run(directory: Path) -> NoReturn:
    """Say that a run is finished, and end the process with status 0."""
    say_finished(directory)
    raise SystemExit(0)


def say_finished(directory: Path) -> None:
    say(f"{directory} is finished, so there is nothing to resume; see its summary.json")


def require_unchanged_run(run: RunToResume, config: ResumableConfig) -> None:
    """Raise a `UserError` if a run was replaced or edited since the command line was read.

    `resumed_config` reads the run without holding its lock. While this command waited for the lock,
    a user may have put another run in its place. Read the run again while this command holds the
    lock, so that no other job can change it, and pass it to this function.

    Args:
        config: the result of `resumed_config`.
    """
    run.refuse_edited_config()
    # Compare as `resumed_config` did, but with the flags and the batch that are saved now. `config`
    # has those that were saved when `resumed_config` read the run.
    saved_flags = fixed_flags(type(config), run.resolved)
    differences = differing_flags(
        saved_flags,
        values_in(config, saved_flags),
        is_saved_auto_fine=True,
        is_moved_data_fine=True,
    )
    changed = flags_in_words(differences, "{flag} {saved}, which was {current}")
    saved_batch = run.stored.saved_config.environment.effective_batch_size
    expected_batch = config.batch_size * config.gradient_accumulation_steps * world_size()
    if expected_batch != saved_batch:
        changed.append(f"an effective batch of {saved_batch}, which was {expected_batch}")
    if changed:
        raise UserError(
            (
                f"another run replaced {run.stored.directory} while this command waited for it "
                f"(the new run has {listed(changed)})"
            ),
            advice="repeat the command",
            resumable=True,
        )


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
    with contextlib.suppress(UserError), locked(directory / LOCK, patience=0):
        return True
    return False


def read_run(directory: Path, config_class: type, recipe: str) -> RunToResume:
    """Read the flags with which a run is to be resumed from its `config.json`.

    The resolved flags have the precision that `auto` chose, and the run's own copy of its initial
    weights. The given flags have the values of the first start, before any was resolved. Flags that
    this version of the recipe lacks are left out.

    Raises:
        UserError: the run is of another recipe, or the file can't be read or is damaged.
    """
    path = directory / CONFIG
    stored = StoredRun(directory)
    # Check the recipe first. Another recipe's file gets a separate message, even if it lacks values
    # that `RunConfig` requires.
    saved_recipe = excerpt_of(stored.config_contents).recipe
    if saved_recipe is None:
        raise UserError(
            f"{path} does not name the recipe of its run",
            advice="restore the file from a backup, or start another run",
        )
    if saved_recipe != recipe:
        raise UserError(
            f"{directory} is a run of {saved_recipe!s:.50}, but this recipe is {recipe}",
            advice="resume the run with its own recipe, or start another run",
        )
    saved_config = stored.saved_config
    if not saved_config.flags or not saved_config.given_flags:
        raise UserError(
            f"{path} contains no flags",
            advice="restore the file from a backup, or start another run",
        )
    precision = saved_config.environment.mixed_precision
    flags = saved_config.flags | {"mixed_precision": precision}
    if os.path.isdir(directory / INITIAL):
        flags["init_from"] = str(directory / INITIAL)
    resolved = known_flags(config_class, flags, path)
    # A flag that is missing in the saved `given` takes its resolved value.
    given_flags = resolved | known_flags(config_class, saved_config.given_flags, path)
    return RunToResume(resolved, given_flags, stored)


def read_run_if_possible(directory: Path, config_class: type, recipe: str) -> RunToResume | None:
    """Read a run's `config.json`; None if the run is another recipe's, or its file is damaged."""
    with contextlib.suppress(UserError):
        return read_run(directory, config_class, recipe)
    return None


def known_flags(config_class: type, flags: Flags, path: Path) -> dict[str, object]:
    """Return the saved flags that a recipe has, with the types of its `Config`.

    Flags that only an earlier version of the recipe had are left out.

    Args:
        path: the file of the flags, for a message.
    """
    names = {field.name for field in fields(config_class)}
    known = {name: value for name, value in flags.items() if name in names}
    # A run with an edited `config.json` is not resumed, so the user can't just correct the value.
    advice = "restore this file from a backup, or start another run"
    return from_json(config_class, known, str(path), advice)
