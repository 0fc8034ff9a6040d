"""What a search tries: ranges and choices, written where a recipe's flags have their values."""

import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from common.config import parse_config
from common.errors import UserError
from common.flags import role_of, spelled
from common.platforms import split_words
from common.recipe import Recipe

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Distribution]  # by name of a flag
# The search gives these itself, or they make no sense in one.
TAKEN = ("output_dir", "resume", "run_name", "evaluate_only", "target")


def parse_space(words: Sequence[str], recipe: Recipe, least: int = 1) -> tuple[Space, list[str]]:
    """Split flags into those to search, by name, and shared ones; the recipe's parser judges."""
    hints = typing.get_type_hints(recipe.config_class)
    space: Space = {}
    shared: list[str] = []
    for given, values in grouped(words).items():
        name = given.removeprefix("--").replace("-", "_")
        if name.removeprefix("no_") in TAKEN:
            raise UserError(f"leave {given} out: it is for one run alone")
        flag, found = spelled(name), None
        # In what names things, a comma or a colon means nothing here.
        if name in hints and role_of(recipe.config_class, name).searched and len(values) == 1:
            kinds = set(typing.get_args(hints[name]) or [hints[name]]) - {type(None)}
            kind = kinds.pop() if kinds in ({int}, {float}) else None
            found = parse_values(flag, values[0], kind)
        if found is None:
            shared += [flag, *values]
        else:
            space[flag.removeprefix("--")] = found
    before = sys.argv
    try:
        ends = {name: ends_of(asked) for name, asked in space.items()}
        for index in range(max(map(len, ends.values()), default=1)):
            sample = {name: held[min(index, len(held) - 1)] for name, held in ends.items()}
            sys.argv = [str(recipe.path), *command_words(space, sample), *shared]
            parse_config(recipe.config_class)
    finally:
        sys.argv = before
    if len(space) < least:
        examples = "a range such as --learning-rate 0.01:1:log, or choices: --batch-size 64,128"
        raise UserError(f"nothing to search: give a flag {examples}")
    return space, shared


def ends_of(asked: Distribution) -> Sequence[Any]:
    return asked.choices if isinstance(asked, CategoricalDistribution) else (asked.low, asked.high)


def grouped(words: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for word in words:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        other = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        if not word.startswith("--"):
            if not groups:
                raise UserError(f"{word} belongs to no flag")
            groups[next(reversed(groups))].append(word)
        elif groups.keys() & {flag, other}:  # of which the last alone would count
            raise UserError(f"{flag} is given twice")
        else:
            groups[flag] = [value] if equals else []
    return groups


def parse_values(flag: str, value: str, kind: Any) -> Distribution | None:
    """Return what a value asks to search of a kind (int, float, None for others), if anything."""
    if kind is not None and ":" in value:
        low, high, *scale = value.split(":")
        distribution = IntDistribution if kind is int else FloatDistribution
        try:
            if scale not in ([], ["log"]):
                raise ValueError(f"{scale} is no scale")
            return distribution(kind(low), kind(high), log=bool(scale))
        except ValueError as problem:
            form = "write a range as low:high, or as low:high:log above 0"
            raise UserError(f"{flag} {value}: {form} ({problem})") from None
    choices = tuple(dict.fromkeys(choice.strip() for choice in value.split(",")))
    if "" in choices and len(choices) > 1:
        raise UserError(f"{flag} {value}: a choice is empty")
    return CategoricalDistribution(choices) if len(choices) > 1 else None


def command_words(space: Space, values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, distribution in space.items():
        value = values[name]
        if isinstance(distribution, FloatDistribution):
            # Four digits are what a person would repeat; they must not leave the range.
            value = min(max(float(f"{value:.4g}"), distribution.low), distribution.high)
        if value in ("true", "false"):
            words.append(f"--{name}" if value == "true" else f"--no-{name}")
        else:  # of a choice in quotes, each word is one
            words += [f"--{name}", *split_words(str(value))]
    return words
