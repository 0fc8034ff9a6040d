"""Limits and roles of flags, stated at a flag's own field, and a record of which flags are used."""

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
    """How the core and the tools treat the value of a flag."""

    repeated: bool  # `--config` takes it from an earlier run
    free: bool  # may change on a resume, because the trained model does not depend on it
    compared: bool  # `common.compare` shows where runs differ in it
    searched: bool  # `common.tune` may try values for it


EVERY_ITEM = CollectionCheckStrategy.ALL_ITEMS
ROLES = {
    # The result of training depends on it.
    "learning": Role(repeated=True, free=False, compared=True, searched=True),
    # Memory depends on it, too.
    "size": Role(repeated=True, free=False, compared=True, searched=True),
    # It names data to read.
    "data": Role(repeated=True, free=False, compared=True, searched=False),
    # How fast the run is, and how often it logs, evaluates or saves.
    "pace": Role(repeated=True, free=True, compared=True, searched=True),
    # Where the run is recorded.
    "record": Role(repeated=True, free=True, compared=False, searched=False),
    # It applies to one run alone.
    "once": Role(repeated=False, free=True, compared=False, searched=False),
    # It changes the kind of run.
    "kind": Role(repeated=False, free=False, compared=False, searched=False),
}
# Flags that take effect only if the recipe makes a call. The core also reads them elsewhere, which
# proves nothing. The call marks them by `mark_read`; a recipe may also read them itself.
TAKES_EFFECT_IN = {
    "schedule": "run.plan.schedule(...)",
    "warmup_steps": "run.plan.schedule(...)",
    "scale_learning_rate": "run.plan.schedule(...)",
    "base_batch_size": "run.plan.schedule(...)",
    "auto_batch_size": "run.start(description, compute_loss)",
    "max_grad_norm": "run.clip_grad_norm_(model, optimizer)",
    "early_stopping": "run.should_stop",
}
# Modules that read all flags only to copy or show them.
MERELY_COPY = (
    *("dataclasses", "common.flags", "common.command_line", "common.resume"),
    *("common.track.", "common.profile."),
)


def flag(
    default: Any, least: float | None = None, most: float | None = None, *, role: str = "learning"
) -> Any:
    """Return a dataclass field for a flag. The comment on the field is the help of the flag.

    Args:
        least: the smallest number that the flag accepts.
        most: the largest number that the flag accepts.
        role: a key of `ROLES`.
    """
    return dataclasses.field(default=default, metadata={"limits": (least, most), "role": role})


def stated(config_class: type, name: str) -> Mapping[str, Any]:
    """Return the ``limits`` and ``role`` of a flag.

    A class may override the default of a flag without `flag`. The limits and the role are then
    those of the base class. A plain field has no limits, and its role is "learning".
    """
    for owner in config_class.__mro__:
        field = vars(owner).get("__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata:
            return field.metadata
    return {"limits": (None, None), "role": "learning"}


def role_of(config_class: type, name: str) -> Role:
    return ROLES[stated(config_class, name)["role"]]


def spelled(name: str) -> str:
    """Return a flag as the command line spells it: ``batch_size`` as ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def check_limits(config: Any) -> None:
    """Raise a `UserError` for the first value that is outside the limits of its flag."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else [value]:
            expected = outside(type(config), field.name, item)
            if expected is not None:
                raise UserError(f"{spelled(field.name)} {item!r:.99} can't work: give {expected}")


def outside(config_class: type, name: str, value: Any) -> str | None:
    """Describe the values that a flag accepts, if it does not accept this one; None if it does.

    Args:
        value: of the flag, or an item of it if the flag is a tuple.
    """
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
    """Whether a value from the command line is UTF-8 text without NUL.

    In a locale that is limited to ASCII, Python decodes each byte of another letter to a surrogate
    escape. Such a value still names the file that the user meant.
    """
    try:
        text = value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return False
    return "\0" not in text and (text == value or is_name(value))


def is_name(value: str) -> bool:
    """Whether a value can name a file in this locale."""
    try:
        return bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


def from_json(config_class: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values of flags that were read from JSON, with its lists as tuples.

    Args:
        source: names the file in messages.

    Raises:
        UserError: a value has the wrong type, or is outside the limits of its flag.
    """
    types = typing.get_type_hints(config_class)
    converted = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    for name, value in converted.items():
        expected = expected_instead(config_class, name, value, types[name])
        if expected is not None:
            words = reprlib.repr(value)
            raise UserError(f"{source} has {words} for {spelled(name)}: give {expected}")
    return converted


def expected_instead(config_class: type, name: str, value: Any, flag_type: Any) -> str | None:
    """Describe the values that a flag accepts, if it does not accept this one; None if it does."""
    type_name = getattr(flag_type, "__name__", str(flag_type)).replace("typing.", "")
    items = value if isinstance(value, tuple) else [value]
    try:
        check_type(value, flag_type, collection_check_strategy=EVERY_ITEM)
    except TypeCheckError:
        return type_name
    for item in items:
        expected = outside(config_class, name, item)
        if expected is not None:
            return expected
    # To Python, and so to `check_type`, True is an int.
    if "bool" not in str(flag_type) and any(isinstance(item, bool) for item in items):
        return type_name
    return None


def record_reads(config: Any) -> None:
    """Record from now on which flags other code reads, until `stop_recording`.

    The object gets a new class, derived from its own. Its ``__class__`` and its pickle still show
    the original class.
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
    """Whether a flag has an effect because this module reads it."""
    if module.startswith(MERELY_COPY):
        return False
    is_core = module.startswith("common.")
    return not (is_core and name in TAKES_EFFECT_IN)


def from_values(config_class: type, values: Mapping[str, Any]) -> Any:
    return config_class(**values)


def set_class(config: Any, config_class: type) -> None:
    """Change the class of an object, even if it overrides ``__class__``."""
    vars(object)["__class__"].__set__(config, config_class)


def mark_read(config: Any, *names: str) -> None:
    """Record that flags have taken effect."""
    flags_read: set[str] = getattr(type(config), "flags_read", set())
    flags_read.update(names)


def stop_recording(config: Any) -> set[str]:
    """Return the flags that were read, and restore the class of the object.

    Without `record_reads`, all flags count as read.
    """
    flags_read = getattr(type(config), "flags_read", None)
    if flags_read is None:
        return {field.name for field in dataclasses.fields(config)}
    set_class(config, type(config).__mro__[1])
    return flags_read


def refuse_unread_flags(config: Any, stated_values: Mapping[str, Any], recipe: str) -> None:
    """Stop recording, and raise a `UserError` for a flag that was set and has no effect.

    Args:
        config: the flags, on which `record_reads` was called.
        stated_values: the flags with which the run was first started.
        recipe: the name of the recipe's file, for the message.
    """
    flags_read = stop_recording(config)
    for field in dataclasses.fields(config):
        value = stated_values.get(field.name, field.default)
        if isinstance(value, list):
            value = tuple(value)
        affects_learning = stated(type(config), field.name)["role"] in ("learning", "size")
        has_default = field.default is not dataclasses.MISSING
        was_set = has_default and value != field.default
        if not affects_learning or not was_set or field.name in flags_read:
            continue
        call = TAKES_EFFECT_IN.get(field.name)
        if call is None:
            change = f"use config.{field.name} before the loop"
        else:
            change = f"it takes effect in {call}"
        raise UserError(
            f"{spelled(field.name)} was set to {value!s:.99}, but {recipe} has not used it by the "
            f"end of the first update: leave it out, or change the recipe ({change})"
        )
