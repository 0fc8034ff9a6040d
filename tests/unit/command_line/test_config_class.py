"""A recipe's `Config` with a value that looks like a flag but is none."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from common.command_line.config_class import refuse_attributes_without_flags
from common.config import TrainingConfig, parse_config
from common.errors import UserError


class Mixin:
    kind = "mixin"


@dataclass(kw_only=True)
class Correct(Mixin, TrainingConfig):
    width: int = 32
    shared: ClassVar = {"a": 1}
    CHOICES = ("a", "b")
    Choice = Literal["a", "b"]
    Sizes = tuple[int, ...]
    Optional = int | None
    convert = functools.partial(int, base=2)
    _cache = None

    @property
    def depth(self) -> int:
        return self.width // 2

    @functools.cached_property
    def area(self) -> int:
        return self.width**2

    @staticmethod
    def half(value: int) -> int:
        return value // 2

    def validate(self) -> None:
        super().validate()

    class Kind:
        pass


@dataclass(kw_only=True)
class Derived(Correct):
    """Has no flags of its own."""


class Renamed(Correct):
    """Is no dataclass, and needs none."""

    TASK: ClassVar[str] = "digits"
    _cache: Any = None


@pytest.mark.parametrize("config_class", [TrainingConfig, Correct, Derived, Renamed])
def test_other_attributes_are_no_mistake(config_class: type) -> None:
    """They are what a class may have besides flags."""
    refuse_attributes_without_flags(config_class)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("width", 32, "write width: int = 32"),
        ("name", "thin", "write name: str = 'thin'"),
        ("widths", (1, 2), "write widths: tuple = (1, 2)"),
        ("batch_size", 64, "write batch_size: int = 64"),
        ("learning_rate", 0.1, "write learning_rate: float | None = 0.1"),
    ],
)
@pytest.mark.parametrize("base", [TrainingConfig, Derived])
def test_flag_without_a_type_is_refused(base: type, name: str, value: Any, advice: str) -> None:
    """The command line would not have it, and a default of the library would stay."""
    config_class: Any = dataclass(kw_only=True)(type("Config", (base,), {name: value}))
    with pytest.raises(UserError) as error:
        parse_config(config_class)
    problem = f"{name} = {value!r} in Config is no flag, because it has no type"
    if name in base.__dataclass_fields__:
        assert error.value.message == f"{problem}: {advice}"
    else:
        constant = f"or if no flag may change it, {name}: ClassVar = {value!r}"
        assert error.value.message == f"{problem}: {advice}, {constant}"


def test_class_that_is_no_dataclass_is_refused() -> None:
    """Its annotated flags would be none, too."""

    class Config(TrainingConfig):
        width: int = 32

    with pytest.raises(UserError, match="Config is no dataclass, so width would be no flag"):
        parse_config(Config)
