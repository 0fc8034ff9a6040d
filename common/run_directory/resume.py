"""Continues the run that `--resume` means, if the flags of this command allow it."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from common.console import say
from common.errors import UserError
from common.run_directory.effective_batch import Config, ResumableConfig, keep_effective_batch
from common.run_directory.resume_search import directory_to_resume
from common.run_directory.run_to_resume import RunToResume, read_run
from common.run_directory.saved_flags import (
    differing_flags,
    fixed_flags,
    flags_in_words,
    has_moved,
    values_in,
)
from common.system.launch_variables import world_size
from common.system.platforms.commands import quoted
from common.system.wording import listed


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
