"""The values that a search tries: ranges and choices, typed instead of the flags' values."""

import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from common.config import parse_config
from common.errors import UserError
from common.flags import field_name, role_of
from common.system.platforms.commands import split_words
from common.tools.flag_words import flags_with_values
from common.tools.recipe import Recipe

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Distribution]  # by name of a flag, without its dashes
# The search sets these flags itself, or they make no sense in a search.
FLAGS_OF_ONE_RUN = ("output_dir", "resume", "run_name", "evaluate_only", "target")


def parse_space(
    words: Sequence[str], recipe: Recipe, least_searched: int = 1
) -> tuple[Space, list[str]]:
    """Split the words of a command line into the flags to search and the shared flags.

    Args:
        words: flags of the recipe, with ranges and choices for the flags to search.
        recipe: the recipe, whose own parser checks the ends of each range and every choice.
        least_searched: the number of flags that must have several values.

    Returns:
        The values to search, and the words that all runs share.

    Raises:
        UserError: a flag is for a single run or occurs twice, a range is malformed, or too few
            flags have several values.
        SystemExit: the recipe does not accept one of the values.
    """
    hints = typing.get_type_hints(recipe.config_class)
    space: Space = {}
    shared: list[str] = []
    for flag, values in values_by_flag(words).items():
        name = field_name(flag)
        if name.removeprefix("no_") in FLAGS_OF_ONE_RUN:
            raise UserError(
                f"{flag} is for a single run, but this command trains several runs",
                advice=f"leave {flag} out",
            )
        distribution = None
        # A comma or a colon may belong to the name of a file or a data set, so flags with such
        # names are never searched.
        may_be_searched = name in hints and role_of(recipe.config_class, name).searched
        if may_be_searched and len(values) == 1:
            distribution = parse_values(flag, values[0], number_type(hints[name]))
        if distribution is None:
            shared += [flag, *values]
        else:
            space[flag.removeprefix("--")] = distribution
    check_with_recipe(space, shared, recipe)
    if len(space) < least_searched:
        examples = (
            "a range, as in --learning-rate 0.01:1:log, or choices, as in --batch-size 64,128"
        )
        raise UserError("no flag has several values to try", advice=f"pass {examples}")
    return space, shared


def number_type(hint: object) -> type[int] | type[float] | None:
    """Return int or float for a numeric flag, which can have a range; None for other flags.

    The type of a numeric flag may also allow None, as ``int | None`` does.
    """
    types = set(typing.get_args(hint) or [hint]) - {type(None)}
    if types == {int}:
        return int
    if types == {float}:
        return float
    return None


def check_with_recipe(space: Space, shared: Sequence[str], recipe: Recipe) -> None:
    """Check before the first run that the recipe accepts all values that will be tried.

    The recipe's own parser reads command lines in which each end of a range, and each choice,
    occurs at least once. The parser ends the process at a value that it does not accept.
    """
    values_to_check = {name: values_at_ends(distribution) for name, distribution in space.items()}
    line_count = max(map(len, values_to_check.values()), default=1)
    # A flag with fewer values than others repeats its last value.
    for index in range(line_count):
        sample = {
            name: values[min(index, len(values) - 1)] for name, values in values_to_check.items()
        }
        with as_command_line(recipe, [*command_words(space, sample), *shared]):
            parse_config(recipe.config_class)


@contextmanager
def as_command_line(recipe: Recipe, words: Sequence[str]) -> Iterator[None]:
    """Within the block, have `parse_config` read the words as the recipe's command line."""
    own_arguments = sys.argv
    sys.argv = [str(recipe.path), *words]
    try:
        yield
    finally:
        sys.argv = own_arguments


def values_at_ends(distribution: Distribution) -> Sequence[object]:
    """Return the values to check: all choices, or the ends of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return (distribution.low, distribution.high)


def values_by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each flag, in the order of the command line.

    The keys are spelled as in ``--batch-size``. A switch has no values.

    Raises:
        UserError: a value has no flag, or a flag occurs twice, also as ``--no-…``.
    """
    values_of_flags: dict[str, list[str]] = {}
    for flag, values in flags_with_values(words):
        is_negative = flag.startswith("--no-")
        opposite = f"--{flag.removeprefix('--no-')}" if is_negative else f"--no-{flag[2:]}"
        # The recipe's parser would take the last value without a word about the first.
        if flag in values_of_flags or opposite in values_of_flags:
            problem = f"{flag} is given twice"
            if opposite in values_of_flags:
                problem = f"{flag} contradicts {opposite}"
            raise UserError(problem, advice="leave one of the two out")
        values_of_flags[flag] = values
    return values_of_flags


def parse_values(
    flag: str, value: str, value_type: type[int] | type[float] | None
) -> Distribution | None:
    """Return the range or the choices in a flag's value; None for a single value.

    Args:
        flag: the flag's spelling, for messages.
        value: the flag's value as typed.
        value_type: the type of the flag's values if they are numbers, which can have a range; None
            for other values.

    Raises:
        UserError: the range is malformed, or a choice is empty.
    """
    if value_type is not None and ":" in value:
        return parse_range(flag, value, value_type)
    choices = tuple(dict.fromkeys(choice.strip() for choice in value.split(",")))
    if "" in choices and len(choices) > 1:
        raise UserError(
            f"{flag} {value} has an empty choice",
            advice="remove the extra comma, or write a value beside it",
        )
    return CategoricalDistribution(choices) if len(choices) > 1 else None


def parse_range(
    flag: str, value: str, value_type: type[int] | type[float]
) -> IntDistribution | FloatDistribution:
    """Return the range that ``low:high`` or ``low:high:log`` describes.

    Raises:
        UserError: the text is malformed, or Optuna refuses the range.
    """
    low, high, *scale = value.split(":")
    distribution = IntDistribution if value_type is int else FloatDistribution
    try:
        if scale not in ([], ["log"]):
            raise ValueError(f"the scale {':'.join(scale)!r} is unknown")
        return distribution(value_type(low), value_type(high), log=bool(scale))  # type: ignore[arg-type]
    except ValueError as problem:
        numbers = "whole numbers" if value_type is int else "numbers"
        advice = (
            f"write low:high, two {numbers} with low below high, or low:high:log with low above 0"
        )
        raise UserError(f"{flag} {value} is not a range ({problem})", advice=advice) from None


def command_words(space: Space, values: Mapping[str, object]) -> list[str]:
    """Return the words that give each searched flag its value on a command line.

    Args:
        space: the searched flags.
        values: a value for each of them, as a study keeps it: a number, or the text of a choice.
    """
    words: list[str] = []
    for name, distribution in space.items():
        value = values[name]
        if isinstance(distribution, FloatDistribution):
            # Four digits are easy to repeat by hand. Rounding must not leave the range.
            value = min(max(float(f"{value:.4g}"), distribution.low), distribution.high)
        if value == "true":  # a switch has no value on the command line
            words.append(f"--{name}")
        elif value == "false":
            words.append(f"--no-{name}")
        else:  # a choice in quotes may hold several words
            words += [f"--{name}", *split_words(str(value))]
    return words
