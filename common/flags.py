"""What a flag may be given and who looks at its value: stated at the flag's own field."""

import dataclasses
import math
import os
import reprlib
import sys
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from common.errors import UserError


class Role(NamedTuple):
    """What is done with a flag's value besides giving it to the recipe."""

    repeated: bool  # by `--config`, from an earlier run
    free: bool  # on resumption: what the model learns does not depend on it
    compared: bool  # `recipes compare` shows where runs differ in it
    searched: bool  # `recipes tune` may try values for it


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
# Flags that have an effect only where a recipe makes a call: that the core reads them for other
# ends says nothing. The call marks them, as `mark_read` does; a recipe may also read them itself.
TAKES_EFFECT_IN = {
    "schedule": "run.plan.schedule(...)",
    "warmup_steps": "run.plan.schedule(...)",
    "scale_learning_rate": "run.plan.schedule(...)",
    "base_batch_size": "run.plan.schedule(...)",
    "auto_batch_size": "run.start(description, compute_loss)",
    "max_grad_norm": "run.clip_grad_norm_(model, optimizer)",
    "early_stopping": "run.should_stop",
}
# Who reads flags to copy or show them all, and does nothing by them.
MERELY_COPY = (
    *("dataclasses", "common.flags", "common.command_line", "common.resume"),
    *("common.track.", "common.profile."),
)


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


def record_reads(config: Any) -> None:
    """Note from now on which flags code looks at, until `stop_recording`.

    The object gets a class of its own, derived from its class, which it seems to be still.
    """
    config_class: Any = type(config)
    if hasattr(config_class, "flags_read"):
        return
    names = frozenset(field.name for field in dataclasses.fields(config))
    flags_read: set[str] = set()

    def look_up(self: Any, name: str) -> Any:
        if name in names and is_use(sys._getframe(1).f_globals.get("__name__", ""), name):
            flags_read.add(name)
        return config_class.__getattribute__(self, name)

    body = {
        "__getattribute__": look_up,
        "__class__": property(lambda self: config_class),
        "__reduce__": lambda self: (from_values, (config_class, dict(vars(self)))),
        "__module__": config_class.__module__,
        "__qualname__": config_class.__qualname__,
        "flags_read": flags_read,
    }
    set_class(config, type(config_class.__name__, (config_class,), body))


def is_use(module: str, name: str) -> bool:
    """Whether a module that reads a flag does something by its value."""
    is_core = module.startswith("common.")
    return not module.startswith(MERELY_COPY) and not (is_core and name in TAKES_EFFECT_IN)


def from_values(config_class: type, values: Mapping[str, Any]) -> Any:
    return config_class(**values)


def set_class(config: Any, config_class: type) -> None:
    """Change an object's class, also where it hides that it has another one."""
    vars(object)["__class__"].__set__(config, config_class)


def mark_read(config: Any, *names: str) -> None:
    """Note that flags have taken effect."""
    flags_read: set[str] = getattr(type(config), "flags_read", set())
    flags_read.update(names)


def stop_recording(config: Any) -> set[str]:
    """Return the flags that were read, and give the object its own class back."""
    flags_read = getattr(type(config), "flags_read", None)
    if flags_read is None:
        return {field.name for field in dataclasses.fields(config)}
    set_class(config, type(config).__mro__[1])
    return flags_read


def unread_flags(config: Any, stated_values: Mapping[str, Any]) -> list[str]:
    """Return the flags that were stated, change what is learned, and were not read; in their order.

    Args:
        config: the flags; `record_reads` was called on them, and this stops the recording.
        stated_values: the flags as they were when the run was first started.
    """
    flags_read = stop_recording(config)
    unread = []
    for field in dataclasses.fields(config):
        value = stated_values.get(field.name, field.default)
        value = tuple(value) if isinstance(value, list) else value
        role = stated(type(config), field.name)["role"]
        is_fixed = role in ("learning", "size") and field.default is not dataclasses.MISSING
        if is_fixed and value != field.default and field.name not in flags_read:
            unread.append(field.name)
    return unread


def refuse_flag(config: Any, name: str, recipe: str) -> None:
    """Raise a `UserError` for a flag that has no effect though it was stated.

    Args:
        recipe: the name of its file.
    """
    call = TAKES_EFFECT_IN.get(name)
    needs = f"it takes effect in {call}" if call else f"use config.{name} before the loop"
    raise UserError(
        f"{spelled(name)} was set to {getattr(config, name)!s:.99}, and nothing in {recipe} has "
        f"used it by the end of the first update: leave it out, or change the recipe ({needs})"
    )
