"""Reads the command line into a dataclass, and composes the text of a recipe's `--help`.

The command line may name an earlier run. Its own flags override those of the run.

Functions import `common.run_directory` only when they read a run, because it needs pydantic. The
help of a tool, which reads no run, would otherwise take twice as long.
"""

import argparse
import ast
import functools
import inspect
import io
import os
import sys
import textwrap
import tokenize
from collections.abc import Set
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar, get_args, get_type_hints

from common.command_line.flag_reads import record_reads
from common.errors import UserError
from common.failures.outcomes import Outcome
from common.failures.sentences import reading
from common.flags import (
    check_limits,
    check_value,
    from_json,
    role_of,
    spelled,
    stated_metadata,
)
from common.output.standard_streams import ignore_lost_output
from common.ranks.rank_exits import let_main_rank_exit_first
from common.storage.json_files import read_json
from common.system.launch_variables import is_main_rank
from common.system.text_secrets import has_secret

# The groups of shared flags in `--help`, each with its first flag in `TrainingConfig`.
GROUPS = {
    "data": "dataset",
    "optimisation": "epochs",
    "precision": "mixed_precision",
    "output": "output_dir",
    "tracking": "tracker",
}
# Flags that name data or models of the Hub, so that a user may pass an address.
FLAGS_WITH_ADDRESSES = ("--dataset", "--init-from", "--model")


if TYPE_CHECKING:
    from common.run_directory.effective_batch import ResumableConfig

    class ParsableConfig(ResumableConfig, Protocol):
        """What the command line needs of a recipe's `Config`, which is a `TrainingConfig`."""

        evaluate_only: bool

        def validate(self) -> None: ...


ConfigType = TypeVar("ConfigType", bound="ParsableConfig")


def parse_config(config_class: type[ConfigType], description: str | None = None) -> ConfigType:
    """Read the command line into a `TrainingConfig`, and call its ``validate``.

    Flags of the command line override those of a `--config` file, if there is one.

    Args:
        description: its first paragraph heads `--help`.

    Raises:
        UserError: a value can't work, or contradicts the run to resume.
        SystemExit: tyro's, for an unknown flag (with the nearest match) or a value of another type.
    """
    ignore_lost_output()
    refuse_credentials(sys.argv[1:])
    # A current directory that was deleted is refused here, with advice.
    with reading("the current directory", "change to a folder that exists"):
        os.getcwd()
    early = read_early(config_class)
    try:
        config = config_from_words(config_class, description, early)
        check_limits(config)
        if config.effective_batch_size is not None and not config.evaluate_only:
            from common.run_directory.effective_batch import with_effective_batch

            config = with_effective_batch(config, config.effective_batch_size)
        # Record reads from here on, so that a flag which only `validate` reads counts as used.
        record_reads(config)
        config.validate()
    except SystemExit as refusal:
        if refusal.code:
            note_refusal(early, refusal)
            let_main_rank_exit_first()
        raise
    return config


def config_from_words(
    config_class: type[ConfigType], description: str | None, early: argparse.Namespace
) -> ConfigType:
    """Return the flags of the command line, and for all others those of a run that it names."""
    saved = saved_defaults(config_class, early)

    def parse(defaults: ConfigType | None) -> ConfigType:
        """Read the command line, whose flags override `defaults`.

        If `defaults` is None, they override the saved flags, or else the recipe's own defaults.
        """
        return parse_words(config_class, description, defaults or saved or config_class())

    if early.resume is None:
        return parse(None)
    from common.run_directory.resume import resumed_config

    recipe = Path(sys.argv[0]).stem
    config: ConfigType = resumed_config(config_class, parse, early.resume, early.output_dir, recipe)
    return config


def saved_defaults(config_class: type[ConfigType], early: argparse.Namespace) -> ConfigType | None:
    """Return the saved flags that the command line overrides; None if it names no saved flags.

    The saved flags are those of the `--config` file. Without one, they are those of the run that
    `--init-from` names, if `--evaluate-only` is set.
    """
    if early.config is not None:
        return read_config(config_class, Path(early.config))
    if early.evaluate_only and early.init_from:
        from common.run_directory.records import CONFIG

        is_run = os.path.isfile(os.path.join(early.init_from, CONFIG))
        return read_config(config_class, Path(early.init_from)) if is_run else None
    return None


def parse_words(
    config_class: type[ConfigType], description: str | None, defaults: ConfigType
) -> ConfigType:
    """Read the command line with tyro, in the groups that `--help` shows.

    Raises:
        SystemExit: for `--help`, an unknown flag or a value of another type.
    """
    import tyro

    flags_class, *group_classes = groups_of(config_class)  # type: ignore[arg-type]
    groups = []
    for group_class in group_classes:
        names = [field.name for field in fields(group_class)]
        groups.append(group_class(*(getattr(defaults, name) for name in names)))
    parsed_groups = tyro.cli(
        flags_class,
        description=(description or "").split("\n\n")[0],
        default=flags_class(*groups),
        console_outputs=is_main_rank(),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    )
    values: dict[str, object] = {}
    for group in vars(parsed_groups).values():
        values |= vars(group)
    return config_class(**values)


def note_refusal(early: argparse.Namespace, refusal: SystemExit) -> None:
    """Write to the run that this command line would have resumed: the command line was refused.

    Otherwise a supervisor would repeat the command forever. `write_refusal` leaves other runs
    alone, such as a finished one.

    Args:
        early: the flags that `read_early` returned.
    """
    from common.run_directory.status import write_refusal

    reason = "the command line was rejected; see its output"
    if isinstance(refusal, UserError):
        reason = refusal.message
    outcome = Outcome("failed", resumable=False, reason=reason)
    write_refusal(directory_named_by(early), outcome, resume=early.resume is not None)


def directory_named_by(early: argparse.Namespace) -> str | Path | None:
    """Return the run's directory that `--resume` or `--output-dir` names; None without both."""
    from common.run_directory.records import CHECKPOINTS_FOLDER

    if early.resume in (None, "auto"):
        directory: str | None = early.output_dir
        return directory
    path = Path(early.resume)
    is_checkpoint = path.parent.name == CHECKPOINTS_FOLDER
    return path.parents[1] if is_checkpoint else path


@functools.cache  # tyro caches facts about classes, so it should get the same classes again
def groups_of(config_class: type) -> list[type]:
    """Return a dataclass of the groups that `--help` shows, and then the class of each group."""
    types = get_type_hints(config_class)
    # Begin with the base class: a comment of the recipe on an inherited flag replaces the other.
    owners = [owner for owner in reversed(config_class.__mro__) if is_dataclass(owner)]
    # The flags that all recipes share are those of `TrainingConfig`. This module can't import it,
    # because `common.config` imports this module.
    shared_flags = owners[0].__annotations__
    comments: dict[str, str] = {}
    for owner in owners:
        comments |= comments_of(owner)
    groups: dict[str, list[tuple[str, object]]] = {name: [] for name in (*GROUPS, "recipe")}
    group_of_first_flag = {first: name for name, first in GROUPS.items()}
    group = "recipe"
    for field in fields(config_class):
        name = field.name
        # A shared flag belongs to the latest group that has begun.
        group = group_of_first_flag.get(name, group)
        # A recipe's own flags are in the group "recipe", except those that name its data.
        own_group = "data" if stated_metadata(config_class, name)["role"] == "data" else "recipe"
        argument = argument_of(types[name], comments.get(name, ""))
        groups[group if name in shared_flags else own_group].append((name, argument))
    classes = {name: make_dataclass(name, flags) for name, flags in groups.items() if flags}
    return [make_dataclass("Flags", classes.items()), *classes.values()]


def argument_of(flag_type: object, comment: str) -> object:
    """Return a flag's type as tyro takes it, with its help.

    The help shows the default, except where the default is None or empty.
    """
    import tyro

    metavar = None
    choices = get_args(flag_type)
    if NoneType in choices and isinstance(choices[0], type):
        # Leave out {None}, which nobody has to write.
        metavar = "{True,False}" if choices[0] is bool else choices[0].__name__.upper()
    shown = tyro.conf.arg(
        help=comment,
        metavar=metavar,
        help_behavior_hint=lambda value: "" if value in ("None", "") else f"(default: {value})",
    )
    return Annotated[flag_type, shown]


@functools.cache
def comments_of(owner: type) -> dict[str, str]:
    """Return the comment above or beside each field of a class, by the field's name.

    These comments are the help of the flags. A formatter may break the line of a field, so the
    comment may be beside any of its lines. A class that was typed into an interpreter has no file,
    and so no comments.
    """
    try:
        source = textwrap.dedent(inspect.getsource(owner))
        definition = ast.parse(source).body[0]
    except (OSError, SyntaxError):
        return {}
    comments_above, comments_beside = comments_by_line(source)
    comments: dict[str, str] = {}
    for field in definition.body if isinstance(definition, ast.ClassDef) else ():
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        for line in range(field.lineno, (field.end_lineno or field.lineno) + 1):
            if line in comments_beside:
                comments[name] = comments_beside[line]
        if field.lineno - 1 in comments_above:
            comments[name] = comments_above[field.lineno - 1]
    return comments


def comments_by_line(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the comments on lines without code, and those beside code, by line from 1."""
    alone: dict[int, str] = {}
    beside: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            has_own_line = not token.line[:column].strip()
            comments = alone if has_own_line else beside
            comments[line] = token.string.lstrip("# ")
    return alone, beside


def read_early(config_class: type) -> argparse.Namespace:
    """Return the flags that choose the defaults of all others, which tyro needs before it parses.

    A flag that is not set is None, or False for `--evaluate-only`.

    Raises:
        UserError: a flag does not allow its value, such as an empty text.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("config", "init_from", "resume", "output_dir"):
        parser.add_argument(spelled(name), f"--{name}")  # tyro accepts both spellings
    parser.add_argument("--evaluate-only", "--evaluate_only", action="store_true")
    try:
        early = parser.parse_known_args()[0]
    except argparse.ArgumentError:  # a flag lacks its value, which tyro then reports
        return parser.parse_args([])
    for name, value in vars(early).items():
        check_value(config_class, name, value)
    return early


def refuse_credentials(words: list[str]) -> None:
    """Raise a `UserError` if a command line contains a secret.

    This comes first, before any message or file can repeat the secret.

    Args:
        words: the arguments of the command line, without the program.
    """
    for word_before, word in zip(["", *words], words, strict=False):
        if not has_secret(word):
            continue
        # The message names the flag, but must not repeat the value. The flag is a part of the same
        # word, as in --dataset=VALUE, or it is the word before.
        flag_and_value = word if word.startswith("--") else word_before
        flag = flag_and_value.split("=")[0]
        advice = "leave it out of the command"
        if flag.replace("_", "-") in FLAGS_WITH_ADDRESSES:
            advice = (
                "pass a Hub id, such as USER/NAME, or a local folder; for private data, put the "
                "token into the environment variable HF_TOKEN"
            )
        # The word before may be another value, as in --tags first SECRET.
        is_flag = flag.startswith("--") and not has_secret(flag)
        place = flag if is_flag else "the command line"
        raise UserError(
            f"{place} seems to contain an access token, or an address with a user name or password",
            advice=advice,
        )


def read_config(config_class: type[ConfigType], path: Path) -> ConfigType:
    """Return the flags in the `config.json` of a run, without flags that concern one run alone.

    Args:
        path: the file, or the directory of the run.

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
    refuse_another_recipe(path, saved.recipe, values.keys(), flag_names)
    repeated = {
        name: value for name, value in values.items() if role_of(config_class, name).repeated
    }
    return config_class(**from_json(config_class, repeated, str(path)))


def refuse_another_recipe(
    path: Path, recipe: object, saved_flags: Set[str], known_flags: Set[str]
) -> None:
    """Raise a `UserError` if a `config.json` does not have the flags of the running recipe.

    A file of another recipe must have exactly the same flags. A file of this recipe may lack some.

    Args:
        recipe: the recipe that the file names; None if it names none. A hand-written file may have
            any JSON value here.
        saved_flags: the flags in the file.
        known_flags: the flags of the running recipe.
    """
    advice = "pass the config.json of a run of this recipe"
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
