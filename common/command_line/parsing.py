"""Reads the command line of a recipe into a dataclass.

The command line may name an earlier run. Its own flags override those of the run.

Functions import `common.run_directory` only when they read a run, because it needs pydantic. The
help of a tool, which reads no run, would otherwise take twice as long.
"""

import argparse
import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from common.command_line.config_class import refuse_attributes_without_flags
from common.command_line.credentials import refuse_credentials
from common.command_line.flag_reads import record_reads
from common.command_line.help_groups import groups_of
from common.command_line.saved_defaults import saved_defaults
from common.errors import UserError
from common.failures.outcomes import Outcome
from common.failures.sentences import reading
from common.flags import check_limits, check_value, spelled
from common.output.standard_streams import ignore_lost_output
from common.ranks.rank_exits import let_main_rank_exit_first
from common.system.launch_variables import is_main_rank

if TYPE_CHECKING:
    from common.run_directory.effective_batch import ResumableConfig

    class ParsableConfig(ResumableConfig, Protocol):
        """The attributes that parsing needs of a recipe's `Config`."""

        evaluate_only: bool

        def validate(self) -> None: ...


ConfigType = TypeVar("ConfigType", bound="ParsableConfig")


def parse_config(config_class: type[ConfigType], description: str | None = None) -> ConfigType:
    """Read the command line into a `TrainingConfig`, and call its ``validate``.

    Flags of the command line override those of a `--config` file, if there is one.

    Args:
        description: its first paragraph heads `--help`.

    Raises:
        UserError: a value can't work, or contradicts the run to resume; or the class has a flag
            without a type.
        SystemExit: tyro's, for an unknown flag (with the nearest match) or a value of another type.
    """
    ignore_lost_output()
    refuse_attributes_without_flags(config_class)
    refuse_credentials(sys.argv[1:])
    # Fail early, with advice, if the current directory was deleted.
    with reading("the current directory", "change to a folder that exists"):
        os.getcwd()
    early_flags = read_early_flags(config_class)
    try:
        config = config_from_words(config_class, description, early_flags)
        check_limits(config)
        if config.effective_batch_size is not None and not config.evaluate_only:
            from common.run_directory.effective_batch import with_effective_batch

            config = with_effective_batch(config, config.effective_batch_size)
        # Record reads from here on, so that a flag which only `validate` reads counts as used.
        record_reads(config)
        config.validate()
    except SystemExit as refusal:
        if refusal.code:
            note_refusal(early_flags, refusal)
            let_main_rank_exit_first()
        raise
    return config


def config_from_words(
    config_class: type[ConfigType], description: str | None, early_flags: argparse.Namespace
) -> ConfigType:
    """Return all flags. Those of the command line override those of a run that it names.

    `saved_defaults` and `resumed_config` say which flags are taken from that run.
    """
    defaults = saved_defaults(config_class, early_flags) or config_class()
    parse = partial(parse_words, config_class, description)
    if early_flags.resume is None:
        return parse(defaults)
    from common.run_directory.resume import resumed_config

    recipe = Path(sys.argv[0]).stem
    config: ConfigType = resumed_config(
        config_class, parse, defaults, early_flags.resume, early_flags.output_dir, recipe
    )
    return config


def parse_words(
    config_class: type[ConfigType], description: str | None, defaults: ConfigType
) -> ConfigType:
    """Read the command line with tyro, in the groups that `--help` shows.

    Args:
        defaults: the values of the flags that the command line does not set.

    Raises:
        SystemExit: for `--help`, an unknown flag or a value of another type.
    """
    import tyro

    flag_groups = groups_of(config_class)  # type: ignore[arg-type]
    groups = []
    for group_class in flag_groups.group_classes:
        names = [field.name for field in fields(group_class)]
        groups.append(group_class(*(getattr(defaults, name) for name in names)))
    parsed_groups = tyro.cli(
        flag_groups.flags_class,
        description=(description or "").split("\n\n")[0],
        default=flag_groups.flags_class(*groups),
        console_outputs=is_main_rank(),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    )
    values: dict[str, object] = {}
    for group in vars(parsed_groups).values():
        values |= vars(group)
    return config_class(**values)


def note_refusal(early_flags: argparse.Namespace, refusal: SystemExit) -> None:
    """Write that this command line was refused to the `status.json` of the run that it names.

    Otherwise a supervisor would repeat the command forever. `write_refusal` leaves other runs
    alone, such as a finished one.

    Args:
        early_flags: the flags that `read_early_flags` returned.
    """
    from common.run_directory.status import write_refusal

    reason = "the command line was rejected; see its output"
    if isinstance(refusal, UserError):
        reason = refusal.message
    outcome = Outcome("failed", resumable=False, reason=reason)
    write_refusal(
        directory_named_by(early_flags), outcome, is_resumed=early_flags.resume is not None
    )


def directory_named_by(early_flags: argparse.Namespace) -> str | Path | None:
    """Return the run's directory that `--resume` or `--output-dir` names; None if neither does.

    `--resume auto` names none.
    """
    from common.run_directory.records import CHECKPOINTS_FOLDER

    if early_flags.resume in (None, "auto"):
        directory: str | None = early_flags.output_dir
        return directory
    path = Path(early_flags.resume)
    is_checkpoint = path.parent.name == CHECKPOINTS_FOLDER
    return path.parents[1] if is_checkpoint else path


def read_early_flags(config_class: type) -> argparse.Namespace:
    """Return the flags that choose the defaults of all others, which are needed before tyro parses.

    A flag that is not set is None, or False for `--evaluate-only`.

    Raises:
        UserError: a flag does not allow its value, such as an empty text.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("config", "init_from", "resume", "output_dir"):
        parser.add_argument(spelled(name), f"--{name}")  # tyro accepts both spellings
    parser.add_argument("--evaluate-only", "--evaluate_only", action="store_true")
    try:
        early_flags = parser.parse_known_args()[0]
    except argparse.ArgumentError:  # a flag lacks its value, which tyro then reports
        return parser.parse_args([])
    for name, value in vars(early_flags).items():
        check_value(config_class, name, value)
    return early_flags
