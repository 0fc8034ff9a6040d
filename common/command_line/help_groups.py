"""Composes the groups of flags that `--help` shows, and the help of each flag.

The help is the comment above or beside a field. tyro would read such comments itself, but not in
classes that are made while the program runs, as the groups are.
"""

import ast
import functools
import inspect
import io
import textwrap
import tokenize
from dataclasses import fields, is_dataclass, make_dataclass
from types import NoneType
from typing import Annotated, NamedTuple, get_args, get_type_hints

from common.flags import stated_metadata

# The groups of `--help`, each with its flags of `TrainingConfig`.
GROUPS = {
    "data": "dataset dataset_config label_column validation_share streaming",
    "optimisation": (
        "init_from epochs max_steps batch_size gradient_accumulation_steps effective_batch_size "
        "auto_batch_size learning_rate scale_learning_rate base_batch_size weight_decay "
        "warmup_steps schedule max_grad_norm seed"
    ),
    "computation": (
        "mixed_precision compile gradient_compression gradient_checkpointing deterministic "
        "num_threads num_workers data_placement collective_timeout"
    ),
    "evaluation": "eval_every keep early_stopping target evaluate_only",
    "run": "output_dir resume config checkpoint_every keep_checkpoints",
    "logging": (
        "log_every tracker project run_name group tags notes log_gradients log_model profile "
        "profile_shapes"
    ),
    "recipe": "",
}
GROUP_OF_FLAG = {flag: group for group, flags in GROUPS.items() for flag in flags.split()}


class FlagGroups(NamedTuple):
    """The dataclasses from which tyro makes the groups of `--help`."""

    flags_class: type  # has a field for each group, in the order of `group_classes`
    group_classes: tuple[type, ...]  # each has a field for each of its flags


@functools.cache  # tyro caches facts about classes, so it should get the same classes again
def groups_of(config_class: type) -> FlagGroups:
    """Return the groups that `--help` shows; a group without flags is left out."""
    types = get_type_hints(config_class)
    # Begin with the base class: a comment of the recipe on an inherited flag replaces the other.
    owners = [owner for owner in reversed(config_class.__mro__) if is_dataclass(owner)]
    comments: dict[str, str] = {}
    for owner in owners:
        comments |= comments_of(owner)
    groups: dict[str, list[tuple[str, object]]] = {name: [] for name in GROUPS}
    for field in fields(config_class):
        name = field.name
        # A recipe's own flags are in the group "recipe", except those that name its data.
        own_group = "data" if stated_metadata(config_class, name)["role"] == "data" else "recipe"
        argument = argument_of(types[name], comments.get(name, ""))
        groups[GROUP_OF_FLAG.get(name, own_group)].append((name, argument))
    classes = {name: make_dataclass(name, flags) for name, flags in groups.items() if flags}
    return FlagGroups(make_dataclass("Flags", classes.items()), tuple(classes.values()))


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
        lines_above = comment_that_ends_at(field.lineno - 1, comments_above)
        if lines_above:
            comments[name] = " ".join(lines_above)
    return comments


def comment_that_ends_at(line: int, comments_above: dict[int, str]) -> list[str]:
    """Return the lines of the comment whose last line is `line`; none if there is no comment."""
    lines: list[str] = []
    while line in comments_above:
        lines.insert(0, comments_above[line])
        line -= 1
    return lines


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
