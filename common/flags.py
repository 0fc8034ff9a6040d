"""What a flag may be given and who looks at its value: stated at the flag's own field."""

import dataclasses
import math
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
    "data": Role(repeated=True, free=False, compared=True, searched=False),  # names what is read
    "pace": Role(repeated=True, free=True, compared=True, searched=True),  # how fast, how often
    "record": Role(repeated=True, free=True, compared=False, searched=False),  # who is told of it
    "once": Role(repeated=False, free=True, compared=False, searched=False),  # of one run alone
    "kind": Role(repeated=False, free=False, compared=False, searched=False),  # of run
}


def flag(
    default: Any, least: float | None = None, most: float | None = None, *, role: str = "learning"
) -> Any:
    """Return a dataclass field for a flag; its help is the comment beside or above it.

    The limits are of a number, or of each number of a tuple; the role is a name in `ROLES`.
    """
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
    """Raise a `UserError` for the first number that is not finite, or outside of its limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least, most = stated(type(config), field.name)["limits"]
        for number in value if isinstance(value, tuple) else [value]:
            if not isinstance(number, (int, float)):
                continue
            if isinstance(number, float) and not math.isfinite(number):
                wanted = "a finite number"
            elif (least is None or number >= least) and (most is None or number <= most):
                continue
            elif None not in (least, most):
                wanted = f"{least:,} to {most:,}"
            else:
                wanted = f"at most {most:,}" if least is None else f"{least:,} or more"
            raise UserError(f"{spelled(field.name)} {number} can't work: give {wanted}")


def from_json(config_class: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return values that JSON holds with tuples for its lists, each of its flag's type."""
    kinds = typing.get_type_hints(config_class)
    found = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    for name, value in found.items():
        try:
            check_type(value, kinds[name], collection_check_strategy=EVERY_ITEM)
        except TypeCheckError as problem:
            said = " ".join(str(problem).split())
            raise UserError(f"{source} has {value!r} for {spelled(name)}: {said}") from None
    return found
