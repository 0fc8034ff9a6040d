"""From a dataclass to the command line and back: tyro, `--config FILE`, `--resume`, no secrets."""

import argparse
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from common.directory import refuse_to_resume
from common.errors import Outcome, UserError, let_main_rank_exit_first
from common.files import read_json
from common.flags import check_limits, from_json, role_of, spelled
from common.machine import is_main_rank
from common.resume import resumed_config

# A password or token before a host: https://user:TOKEN@host, https://TOKEN@host, user:TOKEN@host.
CREDENTIALS = re.compile(r":(//)?[^/\s]*@")

ConfigType = TypeVar("ConfigType", bound=Any)


def parse_config(config_class: type[ConfigType], description: str | None = None) -> ConfigType:
    """Read the command line into a `TrainingConfig`, over a `--config` file if one is given.

    The first paragraph of `description` heads `--help`; the class's ``validate`` is called. Raises
    a `UserError`, or tyro's SystemExit for an unknown flag (with the nearest match) or wrong type.
    """
    refuse_credentials(sys.argv[1:])
    early, saved = read_early(), None

    def parse(defaults: ConfigType | None) -> ConfigType:
        import tyro

        return tyro.cli(
            config_class,
            description=(description or "").split("\n\n")[0],
            default=defaults or saved or config_class(),
            console_outputs=is_main_rank(),
        )

    try:
        evaluated = early.init_from if early.evaluate_only else None
        if early.config is not None:
            saved = read_config(config_class, Path(early.config))
        elif evaluated and os.path.isfile(os.path.join(evaluated, "config.json")):
            saved = read_config(config_class, Path(evaluated))
        if early.resume is not None:
            recipe = Path(sys.argv[0]).stem
            config = resumed_config(config_class, parse, early.resume, early.output_dir, recipe)
        else:
            config = parse(None)
        check_limits(config)
        config.validate()
    except SystemExit as end:
        if end.code:
            run, resume = early.output_dir, early.resume
            if resume not in (None, "auto"):
                is_checkpoint = Path(resume).parent.name == "checkpoints"
                run = Path(resume).parents[1] if is_checkpoint else resume
            reason = getattr(end, "message", "the command line was refused, as it printed")
            refuse_to_resume(run, Outcome("failed", False, reason), resume is not None)
            let_main_rank_exit_first()
        raise
    return config


def tool_parser(name: str, text: str | None, usage: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of `python -m name`, described by its module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {name}",
        usage=usage,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def read_early() -> argparse.Namespace:
    """Return the flags that decide over what defaults the others are read; None if not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("config", "init_from", "resume", "output_dir"):
        parser.add_argument(spelled(name), f"--{name}")
    parser.add_argument("--evaluate-only", "--evaluate_only", action="store_true")
    try:
        return parser.parse_known_args()[0]
    except argparse.ArgumentError:  # a flag without its value: tyro says it better
        return parser.parse_args([])


def refuse_credentials(words: list[str]) -> None:
    """Refuse a command line with a secret in it, before any message or file can repeat it."""
    for before, word in zip(["", *words], words, strict=False):
        if CREDENTIALS.search(word):
            flag = (word if word.startswith("--") else before).split("=")[0]
            advice = "pass a name or a local folder, and the token in the environment, as HF_TOKEN"
            raise UserError(f"{flag} holds a user's name or token: {advice}")


def read_config(config_class: type[ConfigType], path: Path) -> ConfigType:
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise UserError(f"--config {path} does not exist: pass a run's config.json")
    saved = read_json(path)
    values, names = saved.get("config"), {field.name for field in fields(config_class)}
    if not isinstance(values, dict):
        raise UserError(f"{path} is not the config.json of a run: pass one that a recipe wrote")
    if unknown := ", ".join(sorted(values.keys() - names)):
        advice = "it belongs to another recipe or version"
        raise UserError(f"{path} has {unknown}, which this recipe has not: {advice}")
    recipe, missing = saved.get("recipe"), sorted(names - values.keys())
    if missing and recipe not in (None, Path(sys.argv[0]).stem):
        raise UserError(f"{path} belongs to another recipe, {recipe}: it lacks {missing[0]}")
    kept = {n: v for n, v in values.items() if role_of(config_class, n).repeated}
    return config_class(**from_json(config_class, kept, str(path)))
