"""From a dataclass to the command line and back: tyro, `--config FILE`, `--resume`, no secrets."""

import argparse
import contextlib
import functools
import inspect
import os
import re
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from common.console import spare_output
from common.directory import refuse_to_resume
from common.errors import Outcome, UserError, let_main_rank_exit_first
from common.files import read_json, reading
from common.flags import check_limits, from_json, record_reads, role_of, spelled, stated
from common.machine import is_main_rank
from common.resume import accumulated, resumed_config

# A password or token before a host: https://user:TOKEN@host, https://TOKEN@host, user:TOKEN@host;
# and what tokens of the Hub, W&B and GitHub look like.
CREDENTIALS = re.compile(
    r":(//)?[^/\s]*@|hf_[A-Za-z0-9]{30}|wandb_v\d_\w{20}|gh[pousr]_\w{30}|github_pat_\w{20}"
)
# How `--help` groups the shared flags, each group by its first one in `TrainingConfig`.
GROUPS = {
    "data": "dataset",
    "optimisation": "epochs",
    "precision": "mixed_precision",
    "output": "output_dir",
    "tracking": "tracker",
}

ConfigType = TypeVar("ConfigType", bound=Any)


def parse_config(config_class: type[ConfigType], description: str | None = None) -> ConfigType:
    """Read the command line into a `TrainingConfig`, over a `--config` file if one is given.

    The first paragraph of `description` heads `--help`; the class's ``validate`` is called. Raises
    a `UserError`, or tyro's SystemExit for an unknown flag (with the nearest match) or wrong type.
    """
    spare_output()
    refuse_credentials(sys.argv[1:])
    with reading("the current directory", "change to one that is there"):
        os.getcwd()
    early, saved = read_early(), None

    def parse(defaults: ConfigType | None) -> ConfigType:
        import tyro

        kind, *groups = groups_of(config_class)  # type: ignore[arg-type]
        values = defaults or saved or config_class()
        filled = (one(*(getattr(values, each.name) for each in fields(one))) for one in groups)
        given = tyro.cli(
            kind,
            description=(description or "").split("\n\n")[0],
            default=kind(*filled),
            console_outputs=is_main_rank(),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        )
        return config_class(**{n: v for one in vars(given).values() for n, v in vars(one).items()})

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
        if config.effective_batch_size is not None and not config.evaluate_only:
            config = accumulated(config, config.effective_batch_size)
        record_reads(config)  # from here on: what a recipe's own `validate` reads is used
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


@functools.cache  # tyro, too, remembers what it has found out of a type
def groups_of(config_class: type) -> list[Any]:
    """Return a dataclass of the groups that `--help` shows, and each of them, for the parser."""
    import tyro

    hints, shared = get_type_hints(config_class), config_class.__mro__[-2].__annotations__
    groups: dict[str, list[tuple[str, Any]]] = {name: [] for name in (*GROUPS, "recipe")}
    owners = reversed(config_class.__mro__[:-1])
    comments = {name: told for owner in owners for name, told in comments_of(owner).items()}
    firsts, title = {first: name for name, first in GROUPS.items()}, "recipe"
    for name in (field.name for field in fields(config_class)):
        title, kind, metavar = firsts.get(name, title), hints[name], None
        own = "data" if stated(config_class, name)["role"] == "data" else "recipe"
        if NoneType in get_args(kind) and isinstance(one := get_args(kind)[0], type):
            metavar = "{True,False}" if one is bool else one.__name__.upper()  # without {None}
        shown = tyro.conf.arg(
            help=comments.get(name, ""),
            metavar=metavar,
            help_behavior_hint=lambda value: "" if value in ("None", "") else f"(default: {value})",
        )
        groups[title if name in shared else own].append((name, Annotated[kind, shown]))
    made = {title: make_dataclass(title, flags) for title, flags in groups.items() if flags}
    return [make_dataclass("Flags", made.items()), *made.values()]


@functools.cache
def comments_of(owner: type) -> dict[str, str]:
    """Return by flag the comment above or beside its field; none of a class without a file."""
    source = ""
    with contextlib.suppress(OSError):  # typed in
        source = inspect.getsource(owner)
    found = re.findall(r"^    (?:# (.+)\n    (\w+):|(\w+): .*  # (.+)$)", source, re.M)
    return {above or name: told or beside for told, above, name, beside in found}


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
