"""Reads a stored run that a command may resume, with the flags of the recipe's `Config`."""

import contextlib
import os
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from common.flags import from_json
from common.run_directory.directory import INITIAL
from common.run_directory.excerpts import excerpt_of
from common.run_directory.identity import may_be_of_run
from common.run_directory.records import CONFIG, Flags
from common.run_directory.status import read_status
from common.run_directory.stored_run import StoredRun


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
