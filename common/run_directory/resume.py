"""Which run `--resume` means, and whether this command may go on with it."""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from common.console import say
from common.errors import UserError
from common.files import locked
from common.flags import from_json
from common.json_files import JsonObject, read_json
from common.run_directory.directory import INITIAL, LOCK, read_status
from common.run_directory.effective_batch import Config, ResumableConfig, keep_effective_batch
from common.run_directory.identity import EditedConfigError, insist_on_written_config, may_be_of_run
from common.run_directory.records import (
    CONFIG,
    STATUS,
    SUMMARY,
    Flags,
    RunConfig,
    excerpt_of,
    parse_record,
)
from common.run_directory.saved_flags import (
    differing_flags,
    fixed_flags,
    has_moved,
    in_words,
    values_in,
)
from common.system.machine import world_size
from common.system.platforms import quoted
from common.system.printable import listed


class SavedRun(NamedTuple):
    """What a resume needs of a run's `config.json`.

    A resume runs inside the recipe, so it has the flags as the recipe's `Config` takes them. Tools,
    which read runs of any recipe, have them as JSON.
    """

    resolved: dict[str, object]  # the flags, with the values that `auto` chose
    given: dict[str, object]  # the flags as the command line gave them
    record: RunConfig
    contents: JsonObject  # the contents of the file, whose digest an edit changes


def resumed_config(
    config_class: type[Config],
    parse: Callable[[Config | None], Config],
    resume: str,
    output_dir: str | None,
    recipe: str,
) -> Config:
    """Return the configuration of the run to go on with, or a fresh one if there is no such run.

    Args:
        parse: reads the command line over the given defaults.
        resume: the value of `--resume`. It is None in a fresh configuration.

    Raises:
        UserError: there is no such run, it belongs to another recipe, or flags contradict it.
        SystemExit: with status 0, if the run is finished.
    """
    directory = directory_to_resume(parse, resume, output_dir, recipe)
    if directory is None:
        if output_dir is None:
            say(f"--resume auto: runs/ contains no unfinished run of {recipe}, so a new run starts")
        return replace(parse(None), resume=None)  # a new run, which resumes nothing
    run = read_run(directory, config_class, recipe)
    if is_finished(directory, run):
        say_finished(directory)
        raise SystemExit(0)
    insist_on_written_config(directory, run.contents)
    defaults = config_class(**run.resolved)
    config = parse(defaults)
    # The flags that a resume can't change get their saved values back.
    saved_flags = fixed_flags(config_class, run.resolved)
    if has_moved(saved_flags["dataset"], config.dataset):  # fingerprints are compared later
        saved_flags["dataset"] = os.path.abspath(config.dataset)
        config = replace(config, dataset=saved_flags["dataset"])
    refuse_contradictions(config, saved_flags, run, directory)
    # This is the run that was found for "auto", or the run or checkpoint that the user named.
    saved_flags["resume"] = str(directory if resume == "auto" else Path(resume))
    config = replace(config, **saved_flags, output_dir=str(directory))
    return keep_effective_batch(config, defaults, run.record.environment.effective_batch_size)


def directory_to_resume(
    parse: Callable[[Config | None], Config], resume: str, output_dir: str | None, recipe: str
) -> Path | None:
    """Return the directory of the run to go on with; None if `--resume auto` finds no run.

    With `--output-dir`, `--resume auto` means the run in that directory. Otherwise, `--resume auto`
    means the newest unfinished run in `runs/`. See `resumed_config` for the arguments.
    """
    if resume != "auto":
        return run_of(Path(resume), output_dir)
    if output_dir is None:
        return newest_unfinished(parse(None), recipe)
    directory = Path(output_dir)
    return directory if os.path.exists(directory / CONFIG) else None


def refuse_contradictions(
    config: ResumableConfig, saved_flags: dict[str, object], run: SavedRun, directory: Path
) -> None:
    """Raise a `UserError` if the command line changes flags that a resume can't change.

    A flag may have its resolved value; the value that the first command gave it, because that
    command may be repeated; or `auto`, which leaves the choice to the run.
    """
    contradictions = differing_flags(
        saved_flags, values_in(config, saved_flags), given=run.given, is_present_auto_fine=True
    )
    if contradictions:
        phrases = in_words(contradictions, "{flag} {present} (the run has {saved})")
        raise UserError(
            f"can't resume {directory} with {', '.join(phrases)}",
            advice="leave these flags out, or start another run without --resume",
        )


def say_finished(directory: Path) -> None:
    say(f"{directory} is finished, so there is nothing to resume; see its summary.json")


def was_finished_meanwhile(config: ResumableConfig, recipe: str) -> bool:
    """Return whether another job finished the run since `resumed_config` read it.

    `resumed_config` reads the run without its lock. While this command waited for the lock, the job
    that held it may have finished the run, or a user may have put another run in its place. Call
    this while the lock is held, so that no other job can change the answer.

    Raises:
        UserError: another run lies in the run's place.
    """
    assert config.output_dir is not None  # `resumed_config` has set it
    directory = Path(config.output_dir)
    run = read_run(directory, type(config), recipe)
    if is_finished(directory, run):
        say_finished(directory)
        return True
    insist_on_written_config(directory, run.contents)
    # Compare as `resumed_config` did, with the flags that are saved now.
    saved_flags = fixed_flags(type(config), run.resolved)
    differences = differing_flags(
        saved_flags,
        values_in(config, saved_flags),
        is_saved_auto_fine=True,
        is_moved_data_fine=True,
    )
    changed = in_words(differences, "{flag} {saved}, which was {present}")
    samples_before = run.record.environment.effective_batch_size
    samples = config.batch_size * config.gradient_accumulation_steps * world_size()
    if samples != samples_before:
        changed.append(f"an effective batch of {samples_before}, which was {samples}")
    if changed:
        raise UserError(
            (
                f"{directory} was replaced by another run while this command waited for it (it has "
                f"{listed(changed)})"
            ),
            advice="repeat the command",
            resumable=True,
        )
    return False


def run_of(path: Path, output_dir: str | None) -> Path:
    """Return the run directory for a path to a run or to one of its checkpoints.

    A checkpoint is two levels below its run's directory: runs/NAME/checkpoints/step-00000120.

    Raises:
        UserError: the path is not that of a run; the message says what it is instead.
    """
    for directory in (path, path.parent.parent):
        if os.path.isdir(path) and os.path.isfile(directory / CONFIG):
            here = os.path.realpath(directory)
            if output_dir is not None and os.path.realpath(output_dir) != here:
                raise UserError(
                    f"--resume {path} continues the run in its own directory, {directory}, so "
                    "--output-dir can't name another one",
                    advice="leave --output-dir out",
                )
            return directory
    for directory in (path, path.parent.parent):
        if os.path.isdir(path) and os.path.isdir(directory / "checkpoints"):
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
    raise UserError(
        f"--resume {path} is neither the directory of a run nor a checkpoint",
        advice="pass the directory of a run, such as runs/NAME",
    )


def newest_unfinished(config: ResumableConfig, recipe: str) -> Path | None:
    """Return the newest run in `runs/` that is not finished and was started with such flags.

    The result is None if there is no unfinished run that the user could mean. The command then
    begins a new run.

    Raises:
        UserError: all unfinished runs were started with other flags, or the `config.json` of one
            was edited. Otherwise the command would begin at update 0 unnoticed.
    """
    # Unfinished runs that can't go on as they are: see `refuse_to_begin_again`.
    with_other_flags: list[tuple[Path, list[str]]] = []
    edited: list[tuple[Path, EditedConfigError]] = []
    for path in sorted(Path("runs").glob(f"*/{CONFIG}"), key=os.path.getmtime, reverse=True):
        directory = path.parent
        run = read_run_if_possible(directory, type(config), recipe)
        if run is None or is_finished(directory, run):
            continue
        try:
            insist_on_written_config(directory, run.contents)
        except EditedConfigError as refusal:
            edited.append((directory, refusal))
            continue
        saved_flags = fixed_flags(type(config), run.given)
        differences = differing_flags(saved_flags, values_in(config, saved_flags))
        if not differences:
            return directory
        phrases = in_words(differences, "{flag} {saved} there and {present} here")
        with_other_flags.append((directory, phrases))
    refuse_to_begin_again(edited, with_other_flags)
    return None


def refuse_to_begin_again(
    edited: Iterable[tuple[Path, EditedConfigError]],
    with_other_flags: Iterable[tuple[Path, list[str]]],
) -> None:
    """Raise a `UserError` if the user may mean an unfinished run that can't go on as it is.

    Args:
        edited: the runs whose `config.json` was edited, each with its error.
        with_other_flags: the runs that were started with other flags, each with the differences.
    """
    for directory, error in edited:
        if can_be_resumed(directory):
            raise error
    for directory, phrases in with_other_flags:
        if can_be_resumed(directory):
            raise UserError(
                (
                    f"--resume auto found the unfinished run {directory}, but it has other flags "
                    f"({listed(phrases)})"
                ),
                advice=(
                    "leave these flags out and continue that run with --resume "
                    f"{quoted(directory)}, or start another run with --output-dir NEW"
                ),
            )


def can_be_resumed(directory: Path) -> bool:
    """Return whether a user may mean this unfinished run by `--resume auto`.

    `refuse_to_begin_again` then refuses to begin a new run silently, even though the flags don't
    fit. A run that another job is writing, or that was trained to its end, is not a reason to
    refuse.
    """
    if read_status(directory).status == "failed" and (directory / SUMMARY).exists():
        return False  # the run was trained to its end and missed its --target
    # `locked` raises a `UserError` if another job has the lock, and so writes to the run now.
    with contextlib.suppress(UserError), locked(directory / LOCK, patience=0):
        return True
    return False


def read_run(directory: Path, config_class: type, recipe: str) -> SavedRun:
    """Read a run's `config.json`, with the flags that this version of the recipe has.

    Raises:
        UserError: the run is of another recipe, or the file can't be read or is damaged.
    """
    path = directory / CONFIG
    contents = read_json(path)
    # Another recipe's file may lack what the strict record requires, but has a message of its own.
    other_recipe = excerpt_of(contents).recipe
    if other_recipe is None:
        raise UserError(
            f"{path} does not name the recipe of its run",
            advice="restore the file from a backup, or start another run",
        )
    if other_recipe != recipe:
        raise UserError(
            f"{directory} is a run of {other_recipe!s:.50}, but this recipe is {recipe}",
            advice="resume the run with its own recipe, or start another run",
        )
    record = parse_record(contents, RunConfig, str(path))
    if not record.config or not record.given:
        raise UserError(
            f"{path} contains no flags",
            advice="restore the file from a backup, or start another run",
        )
    # A resumed run keeps the precision that `auto` chose, and its own copy of the initial weights.
    flags = record.config | {"mixed_precision": record.environment.mixed_precision}
    if os.path.isdir(directory / INITIAL):
        flags["init_from"] = str(directory / INITIAL)
    resolved = known_flags(config_class, flags, path)
    given = known_flags(config_class, record.given, path)
    # If `given` lacks flags, their resolved values take their place.
    return SavedRun(resolved, resolved | given, record, contents)


def read_run_if_possible(directory: Path, config_class: type, recipe: str) -> SavedRun | None:
    """Read a run's `config.json`; None if the run is another recipe's, or its file is damaged."""
    with contextlib.suppress(UserError):
        return read_run(directory, config_class, recipe)
    return None


def known_flags(config_class: type, flags: Flags, path: Path) -> dict[str, object]:
    """Return the saved flags that a recipe has, as its `Config` takes them.

    Another version of the recipe may have saved flags that this version no longer has.
    """
    names = {field.name for field in fields(config_class)}
    known = {name: value for name, value in flags.items() if name in names}
    return from_json(config_class, known, str(path))


def is_finished(directory: Path, run: SavedRun) -> bool:
    """Whether a run's own `status.json` says that the run is finished."""
    status = read_status(directory)
    return status.status == "finished" and may_be_of_run(status.run_id, run.record.run_id)
