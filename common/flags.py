"""The limits and the role of each flag, stated at its field.

The flags of all recipes are in `common.config`.
"""

import dataclasses
import math
import os
import reprlib
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from common.errors import UserError
from common.system.platforms.commands import command_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # a recipe's `Config` with its values


class Role(NamedTuple):
    """How the tools and a resume treat a flag's value."""

    repeated: bool  # `--config` takes it from the earlier run
    # A resume may change it, because what the model learns does not depend on it.
    free_on_resume: bool
    compared: bool  # `recipes compare` shows where runs differ in it
    searched: bool  # `recipes tune` may try values for it


ROLES = {
    # The role of most flags: they change what the model learns.
    "learning": Role(repeated=True, free_on_resume=False, compared=True, searched=True),
    # Flags that change what the model learns, and how much memory is used. They are treated as
    # those above.
    "size": Role(repeated=True, free_on_resume=False, compared=True, searched=True),
    # Flags that name the data.
    "data": Role(repeated=True, free_on_resume=False, compared=True, searched=False),
    # How fast or how often something happens.
    "pace": Role(repeated=True, free_on_resume=True, compared=True, searched=True),
    # Where and how results are reported.
    "record": Role(repeated=True, free_on_resume=True, compared=False, searched=False),
    # Flags that belong to one run alone, such as its directory.
    "once": Role(repeated=False, free_on_resume=True, compared=False, searched=False),
    # The kind of run, such as `--evaluate-only`.
    "kind": Role(repeated=False, free_on_resume=False, compared=False, searched=False),
}


class FlagMetadata(TypedDict):
    """What a flag states at its field, besides its type and default."""

    limits: tuple[float | None, float | None]  # the least and the largest number
    role: str  # a key of `ROLES`


def flag(
    default: object,
    least: float | None = None,
    most: float | None = None,
    *,
    role: str = "learning",
) -> Any:
    """Return a dataclass field for a flag. The comment at the field is the flag's help.

    The field stands in the place of a value, so that it fits any annotation of a flag.

    Args:
        least: the smallest number allowed; `most` is the largest.
        role: a key of `ROLES`.
    """
    return dataclasses.field(default=default, metadata={"limits": (least, most), "role": role})


def stated_metadata(config_class: type, name: str) -> FlagMetadata:
    """Return the ``limits`` and ``role`` of a flag.

    If a recipe's class only overrides a default, as in ``epochs: int = 5``, the flag keeps the
    limits and the role that the base class states.
    """
    for owner in config_class.__mro__:
        field = vars(owner).get("__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata:
            metadata: FlagMetadata = field.metadata
            return metadata
    return {"limits": (None, None), "role": "learning"}


def role_of(config_class: type, name: str) -> Role:
    """Return the role of a flag. A flag that states no role changes what the model learns."""
    return ROLES[stated_metadata(config_class, name)["role"]]


def field_name(spelling: str) -> str:
    """Return the field of a flag: "batch_size" for "--batch-size" or "batch-size"."""
    return spelling.removeprefix("--").replace("-", "_")


def spelled(name: str) -> str:
    """Return a flag as it is written on the command line, such as ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def as_typed(config_class: type, name: str, value: object) -> str:
    """Return a flag and its value as on the command line, such as ``--hidden-sizes 64 32``."""
    return command_line(words_of_flag(config_class, name, value))


def value_from_json(value: object) -> object:
    """Return the value of a flag that JSON has kept: JSON has lists instead of tuples."""
    return tuple(value) if isinstance(value, list) else value


def words_of_flag(config_class: type, name: str, value: object) -> list[str]:
    """Return the words of a flag and its value, such as ``["--hidden-sizes", "64", "32"]``.

    The command line reads these words back to the same value, except for a tuple with a text that
    begins with a dash.
    """
    # A switch has no value. A flag that may be None has one, such as ``--horizontal-flip False``.
    if typing.get_type_hints(config_class)[name] is bool:
        return [spelled(name if value else f"no_{name}")]
    if isinstance(value, str) and value.startswith("-"):  # as a word alone, it would be a flag
        return [f"{spelled(name)}={value}"]
    values = value if isinstance(value, tuple) else (value,)
    return [spelled(name), *map(str, values)]


def advice_to_omit(config: object, name: str) -> str:
    """Return the advice to leave a flag out of the command.

    With `--config`, the flag may come from that file, so the advice names the file as well.
    """
    config_file = getattr(config, "config", None)
    if config_file is None:
        return f"leave {spelled(name)} out"
    return (
        f"leave {spelled(name)} out of the command, or out of a copy of {config_file} to pass as "
        "--config"
    )


class Misfit(NamedTuple):
    """A value that a flag does not allow."""

    value: object  # an item of the flag's value if that is a tuple or a list with items
    expected: str  # the values that the flag allows


def check_limits(config: "DataclassInstance") -> None:
    """Raise a `UserError` for the first value that is outside of its flag's limits."""
    for field in dataclasses.fields(config):
        check_value(type(config), field.name, getattr(config, field.name))


def flag_values_of(config: "DataclassInstance") -> dict[str, object]:
    """Return each value of a program in the form that flags have, such as a text for a path.

    The command line checks types as it is read. A program may pass any value.

    Raises:
        UserError: a value does not have its flag's type.
    """
    types = typing.get_type_hints(type(config))
    flag_values: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag_value = value_as_flag(value)
        expected = expected_type(types[field.name], flag_value)
        if expected is None:
            flag_values[field.name] = flag_value
        elif expected_type(types[field.name], value) is None:  # the flag is a list
            flag_values[field.name] = value
        else:
            raise UserError(
                f"{type(config).__name__}({field.name}={reprlib.repr(value)}) can't be used",
                advice=f"pass {expected}",
            )
    return flag_values


def value_as_flag(value: Any) -> object:
    """Convert a value from a program to the type that the command line gives.

    A list becomes a tuple, a path becomes a text, and a number of NumPy or torch becomes a number
    of Python. The types are those of `os`, of NumPy and of torch, hence `Any`.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    plain = value.tolist() if hasattr(value, "tolist") else value
    return tuple(plain) if isinstance(plain, list) else plain


def check_value(config_class: type, name: str, value: object) -> None:
    """Raise a `UserError` if a flag does not allow a value."""
    refuse_no_items(config_class, name, value)
    misfit = first_misfit(config_class, name, value)
    if misfit is None:
        return
    problem = "can't be used" if isinstance(misfit.value, str) else "is out of range"
    raise UserError(
        f"{spelled(name)} {misfit.value!r:.99} {problem}", advice=f"pass {misfit.expected}"
    )


def refuse_no_items(config_class: type, name: str, value: object) -> None:
    """Raise a `UserError` for an empty tuple, unless the flag's default is empty too."""
    default = getattr(config_class, name, ())
    if value != () or not default:
        return
    are_numbers = all(isinstance(item, (int, float)) for item in default)
    raise UserError(
        f"{spelled(name)} has no value",
        advice=(
            f"pass one or more {'numbers' if are_numbers else 'values'}, such as "
            f"{as_typed(config_class, name, default)}"
        ),
    )


def check_number(
    name: str, value: float | None, least: float | None, most: float | None = None
) -> None:
    """Raise a `UserError` if the value of a tool's own flag is outside its limits.

    Args:
        name: the flag's name, such as "batch_size".
        value: the flag's value; None if the flag is not passed, which is no error.
        least: the smallest number allowed; `most` is the largest.
    """
    if value is None:
        return
    allowed_numbers = expected_number(value, least, most)
    if allowed_numbers is not None:
        raise UserError(
            f"{spelled(name)} {value!r:.99} is out of range", advice=f"pass {allowed_numbers}"
        )


def first_misfit(config_class: type, name: str, value: object) -> Misfit | None:
    """Return the value, or the first item of a tuple or list, that a flag does not allow.

    The result is None if the whole value is within the flag's limits.
    """
    items = value if isinstance(value, (tuple, list)) else (value,)
    for item in items:
        expected = expected_values(config_class, name, item)
        if expected is not None:
            return Misfit(item, expected)
    return None


def expected_values(config_class: type, name: str, value: object) -> str | None:
    """Return the values that a flag allows, in words; None if it allows `value`.

    Args:
        value: the flag's value, or an item of the value if that is a tuple.
    """
    if isinstance(value, str):
        return expected_text(config_class, name, value)
    if not isinstance(value, (int, float)):
        return None
    return expected_number(value, *stated_metadata(config_class, name)["limits"])


def expected_text(config_class: type, name: str, value: str) -> str | None:
    """Return the texts that a flag allows, in words; None if it allows `value`.

    An empty text is probably a variable of the shell that is not set. As a path, it would be the
    current directory. It is allowed only if it is the flag's default.
    """
    if not value.strip() and value != getattr(config_class, name, None):
        return "text that is not empty, or leave the flag out"
    return None if is_text(value) else "text without NUL, in UTF-8"


def expected_number(value: float, least: float | None, most: float | None) -> str | None:
    """Return the numbers from `least` to `most`, in words; None if `value` is one of them.

    A limit of None allows any finite number.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if (least is None or value >= least) and (most is None or value <= most):
        return None
    if least is None:
        return f"at most {most}"
    if most is None:
        return f"{least} or more"
    return f"a number from {least} to {most}"


def is_text(value: str) -> bool:
    """Whether the value of a flag is text without NUL.

    Under an ASCII locale, Python turns each byte of a letter that is not ASCII into a surrogate
    character. Such a value is allowed if it can name a file. A `config.json` may hold letters
    beside surrogates, which can't.
    """
    try:  # encoding puts the letters together again, and fails for bytes that are not UTF-8
        text = value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return False
    had_surrogates = text != value
    if had_surrogates and not is_name(value):
        return False
    return "\0" not in text


def is_name(value: str) -> bool:
    """Whether the system can have a file of this name."""
    try:
        return bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


def from_json(
    config_class: type, values: Mapping[str, object], source: str, advice: str | None = None
) -> dict[str, Any]:
    """Return the flags of a `config.json`, for `--config` and `--resume`, with tuples for lists.

    The values have the types of their flags, so that they can be passed to `config_class`.

    Args:
        values: only flags that `config_class` has.
        source: the file that a message names.
        advice: what to do about a wrong value; None: replace it in the file.

    Raises:
        UserError: a value does not have its flag's type, or is outside of the flag's limits.
    """
    types = typing.get_type_hints(config_class)
    flags = {}
    for name, value in values.items():
        value = value_from_json(value)
        expected = expected_type(types[name], value)
        misfit = first_misfit(config_class, name, value)
        if expected is None and misfit is not None:
            expected = misfit.expected
        if expected is not None:
            shown = reprlib.repr(value)
            raise UserError(
                f"{source} contains an invalid value of {spelled(name)}, {shown}",
                advice=advice or f"replace it with {expected}",
            )
        flags[name] = value
    return flags


def expected_type(flag_type: Any, value: object) -> str | None:
    """Return a flag's type in words if a value has another type; None if the value fits.

    Args:
        flag_type: a class, or another annotation such as ``int | None``, for which Python has no
            common type.
    """
    # Imported here because the help of a tool does not need it.
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    options = ConfigDict(strict=True, arbitrary_types_allowed=True)
    try:
        TypeAdapter(flag_type, config=options).validate_python(value)
    except ValidationError:
        is_plain = isinstance(flag_type, type) and typing.get_origin(flag_type) is None
        name = flag_type.__name__ if is_plain else str(flag_type)
        return f"a value of type {name.replace('typing.', '')}"
    return None
