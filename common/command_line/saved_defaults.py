"""Reads the flags of an earlier run that the command line names, as defaults for this run.

Functions import `common.run_directory` only when they read a run, because it needs pydantic. The
help of a tool, which reads no run, would otherwise take twice as long.
"""

import argparse
import os
import sys
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common.errors import UserError
from common.flags import from_json, role_of, spelled
from common.storage.json_files import read_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # a recipe's `Config` with its values

ConfigType = TypeVar("ConfigType", bound="DataclassInstance")
# What to do about a run of another recipe, which `--config` or `--init-from` names.
ADVICE_ON_FILE = "pass the config.json of a run of this recipe"
ADVICE_ON_RUN = "evaluate that run with its own recipe, or pass --init-from a run of this recipe"


def saved_defaults(
    config_class: type[ConfigType], early_flags: argparse.Namespace
) -> ConfigType | None:
    """Return the saved flags that the command line overrides; None if it names no saved flags.

    The saved flags are those of the `--config` file. Without one, they are those of the run that
    `--init-from` names, if `--evaluate-only` is set.
    """
    if early_flags.config is not None:
        return read_config(config_class, Path(early_flags.config), ADVICE_ON_FILE)
    if early_flags.evaluate_only and early_flags.init_from:
        from common.run_directory.records import CONFIG

        is_run = os.path.isfile(os.path.join(early_flags.init_from, CONFIG))
        run = Path(early_flags.init_from)
        return read_config(config_class, run, ADVICE_ON_RUN) if is_run else None
    return None


def read_config(
    config_class: type[ConfigType], path: Path, advice_on_recipe: str = ADVICE_ON_FILE
) -> ConfigType:
    """Return the flags in the `config.json` of a run, without flags that concern one run alone.

    Args:
        path: the file, or the directory of the run.
        advice_on_recipe: what to do if the run is of another recipe.

    Raises:
        UserError: the file does not exist, or is not the `config.json` of a run of this recipe.
    """
    from common.run_directory.excerpts import excerpt_of
    from common.run_directory.records import CONFIG

    path = path / CONFIG if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise UserError(
            f"--config {path} does not exist",
            advice="pass the config.json of a run, such as runs/NAME/config.json",
        )
    # `excerpt_of` checks little: a file that a user wrote may have flags alone.
    advice = "restore it from a backup, or pass the config.json of another run"
    saved = excerpt_of(read_json(path, advice))
    values = saved.config_flags
    if values is None:
        raise UserError(
            f"{path} is not the config.json of a run",
            advice="pass the config.json of a run directory, such as runs/NAME/config.json",
        )
    flag_names = {field.name for field in fields(config_class)}
    refuse_another_recipe(path, saved.recipe, values.keys(), flag_names, advice_on_recipe)
    repeated = {
        name: value for name, value in values.items() if role_of(config_class, name).repeated
    }
    return config_class(**from_json(config_class, repeated, str(path)))


def refuse_another_recipe(
    path: Path, recipe: object, saved_flags: Set[str], known_flags: Set[str], advice: str
) -> None:
    """Raise a `UserError` if a `config.json` does not have the flags of the running recipe.

    A file of another recipe must have exactly the same flags. A file of this recipe may lack some.

    Args:
        recipe: the recipe that the file names; None if it names none. A hand-written file may have
            any JSON value here.
        saved_flags: the flags in the file.
        known_flags: the flags of the running recipe.
        advice: what to do about it.
    """
    may_be_own = recipe in (None, Path(sys.argv[0]).stem)
    unknown_flags = ", ".join(map(spelled, sorted(saved_flags - known_flags)))
    if unknown_flags:
        raise UserError(
            f"{path} is from another recipe, or from another version of this one: it contains "
            f"{unknown_flags}, which this recipe does not have",
            advice=advice + (", or a copy of the file without these flags" if may_be_own else ""),
        )
    missing_flags = sorted(known_flags - saved_flags)
    # The recipe may have got flags since the file was written. They get their defaults.
    if missing_flags and not may_be_own:
        raise UserError(
            f"{path} belongs to another recipe, {recipe}, and has no value for "
            f"{spelled(missing_flags[0])}",
            advice=advice,
        )
