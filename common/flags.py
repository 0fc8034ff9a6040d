"""What a flag may be given and who looks at its value: stated at the flag's own field."""

import dataclasses
import math
import os
import reprlib
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from common.errors import UserError


class Role(NamedTuple):
    """What is done with a flag's value besides giving it to the recipe."""

    repeated: bool  # by `--config`, from an earlier run
    free: bool  # on resumption: what the model learns does not depend on it
    compared: bool  # `common.compare` shows where runs differ in it
    searched: bool  # `common.tune` may try values for it


EVERY_ITEM = CollectionCheckStrategy.ALL_ITEMS
ROLES = {
    "learning": Role(repeated=True, free=False, compared=True, searched=True),
    "size": Role(repeated=True, free=False, compared=True, searched=True),  # takes memory as well
    "data": Role(repeated=True, free=False, compared=True, searched=False),  # names what is read
    "pace": Role(repeated=True, free=True, compared=True, searched=True),  # how fast, how often
    "record": Role(repeated=True, free=True, compared=False, searched=False),  # who is told of it
    "once": Role(repeated=False, free=True, compared=False, searched=False),  # of one run alone
    "kind": Role(repeated=False, free=False, compared=False, searched=False),  # of run
}


def flag(
    default: Any, least: float | None = None, most: float | None = None, *, role: str = "learning"
) -> Any:
    """Return a dataclass field for a flag, with limits of its numbers; its comment is its help."""
    return dataclasses.field(default=default, metadata={"limits": (least, most), "role": role})


def stated(config_class: type, name: str) -> Mapping[str, Any]:
    """Return what is stated of a flag: by the class, or by one whose default it overrides."""
    for owner in config_class.__mro__:
        found = vars(owner).get("__dataclass_fields__", {}).get(name)
        if found is not None and found.metadata:
            return found.metadata
    return {"limits": (None, None), "role": "learning"}


def role_of(config_class: type, name: str) -> Role:
    """Return the role of a flag; one that a recipe adds is of what is learned, unless it says."""
    return ROLES[stated(config_class, name)["role"]]


def spelled(name: str) -> str:
    """Return a flag as it is on the command line: ``batch_size`` as ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def check_limits(config: Any) -> None:
    """Raise a `UserError` for the first value that is outside of its flag's limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else [value]:
            if wanted := outside(type(config), field.name, item):
                raise UserError(f"{spelled(field.name)} {item!r:.99} can't work: give {wanted}")


def outside(config_class: type, name: str, value: Any) -> str | None:
    """Return what should be given instead of a flag's value, or one of a tuple; None if nothing."""
    if isinstance(value, str):
        return None if is_text(value) else "text without NUL, in UTF-8"
    if not isinstance(value, (int, float)):
        return None
    least, most = stated(config_class, name)["limits"]
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if (least is None or value >= least) and (most is None or value <= most):
        return None
    if None not in (least, most):
        return f"{least:,} to {most:,}"
    return f"at most {most:,}" if least is None else f"{least:,} or more"


def is_text(value: str) -> bool:
    """Whether a value is text without NUL, as it came from the command line.

    Where the locale knows ASCII alone, other letters arrive as the bytes that they have in UTF-8,
    each in a character of its own, and name the files that have them.
    """
    try:
        words = value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return False
    return "\0" not in words and (words == value or is_name(value))


def is_name(value: str) -> bool:
    try:
        return bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


def from_json(config_class: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return values that JSON holds with tuples for its lists; a `UserError` names a wrong one."""
    kinds = typing.get_type_hints(config_class)
    found = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    for name, value in found.items():
        kind: Any = kinds[name]
        items = value if isinstance(value, tuple) else [value]
        try:
            check_type(value, kind, collection_check_strategy=EVERY_ITEM)
            is_number = "bool" not in str(kind) and any(isinstance(one, bool) for one in items)
            wanted = next(filter(None, (outside(config_class, name, one) for one in items)), None)
        except TypeCheckError:
            is_number, wanted = True, None
        if is_number or wanted:
            wanted = wanted or getattr(kind, "__name__", str(kind)).replace("typing.", "")
            shown = reprlib.repr(value)
            raise UserError(f"{source} has {shown} for {spelled(name)}: give {wanted}")
    return found
