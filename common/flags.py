"""The limits and the role of each flag, stated at its field, and the flags that code has read."""

import dataclasses
import math
import os
import reprlib
import sys
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from common.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # a recipe's `Config` with its values


class Role(NamedTuple):
    """How the tools and a resume treat a flag's value."""

    repeated: bool  # `--config` takes it from the earlier run
    free: bool  # a resume may change it, because what the model learns does not depend on it
    compared: bool  # `recipes compare` shows where runs differ in it
    searched: bool  # `recipes tune` may try values for it


ROLES = {
    # The role of most flags: they change what the model learns.
    "learning": Role(repeated=True, free=False, compared=True, searched=True),
    # The same, for flags that also change how much memory is used.
    "size": Role(repeated=True, free=False, compared=True, searched=True),
    # Flags that name the data.
    "data": Role(repeated=True, free=False, compared=True, searched=False),
    # How fast or how often something happens.
    "pace": Role(repeated=True, free=True, compared=True, searched=True),
    # Where and how results are reported.
    "record": Role(repeated=True, free=True, compared=False, searched=False),
    # Flags that belong to one run alone, such as its directory.
    "once": Role(repeated=False, free=True, compared=False, searched=False),
    # The kind of run, such as `--evaluate-only`.
    "kind": Role(repeated=False, free=False, compared=False, searched=False),
}


class RecipeCall(NamedTuple):
    """A call by which a recipe puts a flag into effect."""

    text: str  # as a message shows it
    # Whether it belongs into the loop, where a recipe may make it only after the first update.
    is_in_loop: bool = False

    @property
    def name(self) -> str:
        """The call without its arguments, such as ``run.plan.schedule``."""
        return self.text.partition("(")[0]


SCHEDULE = RecipeCall("run.plan.schedule(...)")
# Flags that take effect only if a recipe makes a certain call. The core reads them for other
# purposes too, which does not count as a use. The call itself counts, by `mark_read`, and so does a
# recipe that reads the flag.
TAKES_EFFECT_IN = {
    "schedule": SCHEDULE,
    "warmup_steps": SCHEDULE,
    "scale_learning_rate": SCHEDULE,
    "base_batch_size": SCHEDULE,
    "auto_batch_size": RecipeCall("run.start(description, compute_loss)"),
    "max_grad_norm": RecipeCall("run.clip_grad_norm_(model, optimizer)", is_in_loop=True),
    "early_stopping": RecipeCall("run.should_stop", is_in_loop=True),
}
# Modules that only copy or show all flags. Their reading a flag does not count as a use.
MERELY_COPY = (
    *("dataclasses", "common.flags", "common.command_line", "common.run_directory.resume"),
    *("common.track.", "common.profile."),
)


class FlagFacts(TypedDict):
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

    Args:
        least: the smallest number allowed; `most` is the largest.
        role: a key of `ROLES`.
    """
    return dataclasses.field(default=default, metadata={"limits": (least, most), "role": role})


def stated(config_class: type, name: str) -> FlagFacts:
    """Return the ``limits`` and ``role`` of a flag.

    If a recipe's class only overrides a default, as in ``epochs: int = 5``, the flag keeps the
    limits and the role that the base class states.
    """
    for owner in config_class.__mro__:
        field = vars(owner).get("__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata:
            facts: FlagFacts = field.metadata
            return facts
    return {"limits": (None, None), "role": "learning"}


def role_of(config_class: type, name: str) -> Role:
    """Return the role of a flag. A flag that states none changes what the model learns."""
    return ROLES[stated(config_class, name)["role"]]


def spelled(name: str) -> str:
    """Return a flag as the command line has it, such as ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"


def check_limits(config: "DataclassInstance") -> None:
    """Raise a `UserError` for the first value that is outside of its flag's limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else [value]:
            expected = outside(type(config), field.name, item)
            if expected is not None:
                raise UserError(
                    f"{spelled(field.name)} {item!r:.99} can't work", advice=f"give {expected}"
                )


def outside(config_class: type, name: str, value: object) -> str | None:
    """Return the values that a flag allows, if it does not allow this one; None if it does.

    Args:
        value: the flag's value, or an item of it if it is a tuple.
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
    """Whether a value from the command line is text without NUL.

    Under an ASCII locale, Python turns each byte of a letter that is not ASCII into a surrogate
    character. Such a value is allowed if it can name a file.
    """
    try:  # this puts the letters together again, and fails for bytes that are no UTF-8
        words = value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return False
    return "\0" not in words and (words == value or is_name(value))


def is_name(value: str) -> bool:
    """Whether the system can have a file of this name."""
    try:
        return bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


def from_json(config_class: type, values: Mapping[str, object], source: str) -> dict[str, Any]:
    """Return flags that JSON holds, with tuples in place of its lists.

    Args:
        source: the file that a message names.

    Raises:
        UserError: a value has another type than its flag, or is outside of the flag's limits.
    """
    types = typing.get_type_hints(config_class)
    flags = {}
    for name, value in values.items():
        value = tuple(value) if isinstance(value, list) else value
        expected = outside_type(types[name], value) or outside_limits(config_class, name, value)
        if expected is not None:
            shown = reprlib.repr(value)
            raise UserError(f"{source} has {shown} for {spelled(name)}", advice=f"give {expected}")
        flags[name] = value
    return flags


def outside_type(expected_type: Any, value: object) -> str | None:
    """Return the name of the expected type if a value has another one; None if it fits."""
    # Imported here because the help of a tool does not need it.
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    options = ConfigDict(strict=True, arbitrary_types_allowed=True)
    try:
        TypeAdapter(expected_type, config=options).validate_python(value)
    except ValidationError:
        is_plain = isinstance(expected_type, type) and typing.get_origin(expected_type) is None
        name = expected_type.__name__ if is_plain else str(expected_type)
        return name.replace("typing.", "")
    return None


def outside_limits(config_class: type, name: str, value: object) -> str | None:
    """Return the flag's limits if a value, or an item of a tuple, is outside of them."""
    for item in value if isinstance(value, tuple) else [value]:
        expected = outside(config_class, name, item)
        if expected is not None:
            return expected
    return None


def record_reads(config: "DataclassInstance") -> None:
    """Note from now on which flags code looks at, until `stop_recording`.

    `unread_flags` needs this, to find flags that were set and have no effect. The object gets a
    new class that notes each reading. The new class is derived from the object's own, and to other
    code the object still seems to be of its own class.
    """
    config_class = type(config)
    if hasattr(config_class, "flags_read"):
        return
    names = frozenset(field.name for field in dataclasses.fields(config))
    flags_read: set[str] = set()

    def look_up(self: "DataclassInstance", name: str) -> object:
        """Return an attribute, and note it if it is a flag that the calling module uses."""
        if name in names and is_use(sys._getframe(1).f_globals.get("__name__", ""), name):
            flags_read.add(name)
        return config_class.__getattribute__(self, name)

    body = {
        "__getattribute__": look_up,
        "__class__": property(lambda self: config_class),  # for `isinstance`
        # To pickle it for a loader's worker: there it is an object of its own class.
        "__reduce__": lambda self: (from_values, (config_class, dict(vars(self)))),
        "__module__": config_class.__module__,
        "__qualname__": config_class.__qualname__,
        "flags_read": flags_read,
    }
    set_class(config, type(config_class.__name__, (config_class,), body))


def is_use(module: str, name: str) -> bool:
    """Whether a module that reads a flag does something by its value.

    A recipe and other code of the user's always does. Modules of the core do, except for those that
    only copy flags, and for flags that need a call in the recipe to take effect.
    """
    is_core = module.startswith("common.")
    return not module.startswith(MERELY_COPY) and not (is_core and name in TAKES_EFFECT_IN)


def from_values(config_class: type, values: Mapping[str, object]) -> object:
    """Return the config that a pickle of it stands for; pickle needs a named function."""
    return config_class(**values)


def set_class(config: object, config_class: type) -> None:
    """Change an object's class, also of an object from `record_reads`, which hides its real class.

    A plain assignment to ``__class__`` would meet the property that hides the real class.
    """
    vars(object)["__class__"].__set__(config, config_class)


def mark_read(config: object, *names: str) -> None:
    """Note that flags have taken effect, for the calls in `TAKES_EFFECT_IN`.

    Nothing happens to a config whose reads are not recorded.
    """
    flags_read: set[str] = getattr(type(config), "flags_read", set())
    flags_read.update(names)


def stop_recording(config: "DataclassInstance") -> set[str]:
    """Return the flags that were read, and give the object its own class back.

    If nothing was recorded, all flags count as read, so that none is reported as unused.
    """
    flags_read = getattr(type(config), "flags_read", None)
    if flags_read is None:
        return {field.name for field in dataclasses.fields(config)}
    set_class(config, type(config).__mro__[1])
    return flags_read


def unread_flags(config: "DataclassInstance", stated_values: Mapping[str, object]) -> list[str]:
    """Return the flags that a user set, that change what is learned, and that nothing has read.

    They are in the order of the fields. A flag at its default counts as not set.

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


def refuse_flag(config: object, name: str, recipe: str) -> None:
    """Raise a `UserError` for a flag that was set and has no effect.

    Args:
        recipe: the name of the recipe's file.
    """
    call = TAKES_EFFECT_IN.get(name)
    needs = f"it takes effect in {call.text}" if call else f"use config.{name} before the loop"
    raise UserError(
        (
            f"{spelled(name)} was set to {getattr(config, name)!s:.99}, and nothing in {recipe} "
            "has used it by the end of the first update"
        ),
        advice=f"leave {spelled(name)} out, or change the recipe so that {needs}",
    )
