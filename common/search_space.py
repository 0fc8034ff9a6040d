"""What a search tries: ranges and choices, written where a recipe's flags have their values."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shlex
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import TrainingConfig, parse_config
from common.errors import UserError

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

# The search gives these itself.
TAKEN = {"output_dir", "resume", "run_name", "evaluate_only", "target_accuracy"}
# These name things; a comma or a colon in them means nothing here.
NAMES = {
    *("dataset", "dataset_config", "init_from", "config", "tracker", "project", "tags"),
    *("label_column", "image_column", "text_columns"),
}
RANGE = re.compile(r"(?P<low>[^:,]+):(?P<high>[^:,]+?)(?P<log>:log)?")


@dataclass(frozen=True)
class Dimension:
    """One flag whose value is searched: a range of numbers, or choices."""

    flag: str  # such as --learning-rate
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[str, ...] = ()

    def suggest(self, trial: BaseTrial) -> list[str]:
        """Return the words that a trial puts on the command line for this flag."""
        name = self.flag.removeprefix("--")
        if self.choices:
            return self.words(str(trial.suggest_categorical(name, self.choices)))
        if self.is_whole:
            low, high = int(self.low), int(self.high)
            return self.words(str(trial.suggest_int(name, low, high, log=self.is_log)))
        value = trial.suggest_float(name, self.low, self.high, log=self.is_log)
        # Four digits are what a person would repeat; they must not leave the range.
        return self.words(str(min(max(float(f"{value:.4g}"), self.low), self.high)))

    def words(self, value: str) -> list[str]:
        """Return the flag with a value; of a choice in quotes, each word is one."""
        if value in ("true", "false"):
            return [self.flag if value == "true" else f"--no-{self.flag.removeprefix('--')}"]
        return [self.flag, *shlex.split(value)]

    def ends(self) -> tuple[list[str], list[str]]:
        """Return the words of the least and the greatest value, or of the first and last choice."""
        if self.choices:
            return self.words(self.choices[0]), self.words(self.choices[-1])
        low, high = (int(v) if self.is_whole else v for v in (self.low, self.high))
        return self.words(str(low)), self.words(str(high))


def load_config_class(recipe: Path) -> type[TrainingConfig]:
    """Return the `Config` of a recipe, without running it.

    Raises:
        UserError: when there is no such file, or it is no recipe.
    """
    if not recipe.is_file():
        raise UserError(f"{recipe} does not exist: pass a recipe, such as recipes/resnet.py")
    spec = importlib.util.spec_from_file_location(f"searched_{recipe.stem}", recipe)
    if spec is None or spec.loader is None:
        raise UserError(f"{recipe} is no recipe: pass a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the dataclass looks its types up
    spec.loader.exec_module(module)
    config_class = getattr(module, "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, TrainingConfig)):
        raise UserError(f"{recipe} is no recipe: it has no Config that is a TrainingConfig")
    return config_class


def parse_space(
    words: Sequence[str], config_class: type[TrainingConfig], recipe: Path
) -> tuple[list[Dimension], list[str]]:
    """Split a recipe's flags into those to search, and those that all trials share.

    ``low:high`` and ``low:high:log`` are ranges of numbers, whole ones where the flag takes whole
    ones; ``a,b,c`` are choices, ``true,false`` for a flag without a value.

    Raises:
        UserError: for a flag that the recipe has not, or a range that can't be searched.
        SystemExit: from tyro, when the recipe would not take an end of a range.
    """
    hints = typing.get_type_hints(config_class)
    names = [field.name for field in fields(config_class)]
    dimensions: list[Dimension] = []
    shared: list[str] = []
    for flag, values in grouped(words):
        name = flag.removeprefix("--").replace("-", "_")
        known = name if name in names else name.removeprefix("no_")
        if known not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f": did you mean --{close[0].replace('_', '-')}?" if close else ""
            raise UserError(f"{recipe} has no flag {flag}{hint}")
        if known in TAKEN:
            raise UserError(f"leave {flag} out: the search gives it to each trial itself")
        flag = f"--{name.replace('_', '-')}"
        found = None
        if known not in NAMES and len(values) == 1:
            found = parse_dimension(flag, values[0], numeric_type(hints[known]))
        if found is None:
            shared += [flag, *values]
        else:
            dimensions.append(found)
    if not dimensions:
        raise UserError(
            "nothing to search: give a flag a range such as --learning-rate 0.01:1:log, or "
            "choices such as --batch-size 64,128"
        )
    for end in (0, 1):
        sample = [word for dimension in dimensions for word in dimension.ends()[end]]
        check(config_class, recipe, [*sample, *shared])
    return dimensions, shared


def grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with its values.

    Raises:
        UserError: for a word before the first flag, or a flag given twice.
    """
    groups: dict[str, list[str]] = {}
    last: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if flag in groups:
                raise UserError(f"{flag} is given twice")
            last = groups.setdefault(flag, [value] if equals else [])
        elif last is None:
            raise UserError(f"{word} belongs to no flag")
        else:
            last.append(word)
    return list(groups.items())


def parse_dimension(flag: str, value: str, kind: type | None) -> Dimension | None:
    """Return what a value asks to search; None where it is a single one.

    Args:
        kind: int or float for a flag that takes numbers.
    """
    found = RANGE.fullmatch(value)
    if found and kind is not None:
        try:
            low, high = kind(found["low"]), kind(found["high"])
        except ValueError:
            number = "whole numbers" if kind is int else "numbers"
            raise UserError(f"{flag} {value}: the ends of a range must be {number}") from None
        if not low < high:
            raise UserError(f"{flag} {value}: a range goes from less to more")
        if found["log"] and low <= 0:
            raise UserError(f"{flag} {value}: a logarithmic range begins above 0")
        return Dimension(flag, low, high, bool(found["log"]), kind is int)
    choices = tuple(dict.fromkeys(choice.strip() for choice in value.split(",")))
    if len(choices) == 1:
        if kind is not None and ":" in value:
            raise UserError(f"{flag} {value}: write a range as low:high or low:high:log")
        return None
    if "" in choices:
        raise UserError(f"{flag} {value}: a choice is empty")
    return Dimension(flag, choices=choices)


def numeric_type(hint: Any) -> type | None:
    """Return int or float for a flag that takes one number, None for any other."""
    kinds = set(typing.get_args(hint) or [hint]) - {type(None)}
    return next((kind for kind in (int, float) if kinds == {kind}), None)


def check(config_class: type[TrainingConfig], recipe: Path, words: list[str]) -> None:
    """Let the recipe's own parser read a command line; it says what is wrong, and ends."""
    before, sys.argv = sys.argv, [str(recipe), *words]
    try:
        parse_config(config_class)
    finally:
        sys.argv = before
