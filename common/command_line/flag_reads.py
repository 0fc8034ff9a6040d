"""Notes which flags code reads, so that a run can name flags that were set without effect.

`common.lifecycle.unread_flags` uses it after the first update.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from common.errors import UserError
from common.flags import advice_to_omit, as_typed, stated_metadata, value_from_json
from common.system.wording import shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # a recipe's `Config` with its values

MAX_FLAG_CHARACTERS = 99  # characters of a flag with its value that an error repeats


class RecipeCall(NamedTuple):
    """A call by which a recipe puts a flag into effect."""

    text: str  # the call in the form that a message shows
    # Whether the call belongs in the loop, where it may come only after the first update.
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
# The modules that only copy or show all flags, by the beginnings of their names. If they read a
# flag, that does not count as a use.
MERELY_COPY = (
    "dataclasses",
    "common.flags",
    "common.command_line.",
    "common.lifecycle.start.environment",  # and environment_changes, which reads no flag
    "common.run_directory.resume",  # and resume_search
    "common.track.",
    "common.profile.",
)
# The flags that were read, by the class that `record_reads` has given a config.
FLAGS_READ: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def record_reads(config: "DataclassInstance") -> None:
    """Note from now on which flags code reads, until `stop_recording`.

    `unread_flags` needs this, to find flags that were set and have no effect. The object gets a new
    class that notes each reading. The new class derives from the object's own class, and hides
    itself from other code.
    """
    config_class = type(config)
    if config_class in FLAGS_READ:
        return
    names = frozenset(field.name for field in dataclasses.fields(config))
    flags_read: set[str] = set()

    def look_up(self: "DataclassInstance", name: str) -> object:
        """Return an attribute, and note it if it is a flag that the calling module uses."""
        if name in names and is_use(sys._getframe(1).f_globals.get("__name__", ""), name):
            flags_read.add(name)
        return config_class.__getattribute__(self, name)

    class_attributes = {
        "__getattribute__": look_up,
        "__class__": property(lambda self: config_class),  # for `isinstance`
        # Pickled for a loader's worker, it becomes an object of its own class.
        "__reduce__": lambda self: (from_values, (config_class, dict(vars(self)))),
        "__module__": config_class.__module__,
        "__qualname__": config_class.__qualname__,
    }
    recording_class = type(config_class.__name__, (config_class,), class_attributes)
    FLAGS_READ[recording_class] = flags_read
    set_class(config, recording_class)


def is_use(module: str, name: str) -> bool:
    """Whether a module that reads a flag counts as using its value.

    Recipes and a user's other code always count. Modules of `common` count, unless they only copy
    flags, or the flag needs a call in the recipe to take effect.
    """
    if module.startswith(MERELY_COPY):
        return False
    return not (module.startswith("common.") and name in TAKES_EFFECT_IN)


def from_values(config_class: type, values: Mapping[str, object]) -> object:
    """Return the config that was pickled; pickle needs a named function."""
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
    flags_read = FLAGS_READ.get(type(config))
    if flags_read is not None:
        flags_read.update(names)


def is_read(config: object, name: str) -> bool:
    """Whether code has read a flag so far; false for a config whose reads are not recorded."""
    return name in FLAGS_READ.get(type(config), ())


def stop_recording(config: "DataclassInstance") -> set[str]:
    """Return the flags that were read, and give the object its own class back.

    If nothing was recorded, all flags count as read, so that none is reported as unused.
    """
    flags_read = FLAGS_READ.get(type(config))
    if flags_read is None:
        return {field.name for field in dataclasses.fields(config)}
    recording_class = type(config)
    own_class = recording_class.__mro__[1]
    set_class(config, own_class)
    return flags_read


def unread_flags(config: "DataclassInstance", given_flags: Mapping[str, object]) -> list[str]:
    """Return the flags that a user set, that change what is learned, and that nothing has read.

    The flags are in the order of the fields. A flag at its default counts as not set, and so does a
    flag without a default. Flags on data are left out: `common.data.unused_flags` checks them.

    Args:
        config: the flags. `record_reads` was called on them, and this call stops the recording.
        given_flags: all flags of the first start, before any was resolved.
    """
    flags_read = stop_recording(config)
    unread = []
    for field in dataclasses.fields(config):
        value = value_from_json(given_flags.get(field.name, field.default))
        role = stated_metadata(type(config), field.name)["role"]
        changes_learning = role in ("learning", "size")
        is_set = field.default is not dataclasses.MISSING and value != field.default
        if changes_learning and is_set and field.name not in flags_read:
            unread.append(field.name)
    return unread


def unused_flag_error(config: object, name: str, recipe: str) -> UserError:
    """Return the error for a flag that was set and has no effect.

    Args:
        recipe: the name of the recipe's file.
    """
    typed = as_typed(type(config), name, getattr(config, name))
    typed_flag = shortened(typed, MAX_FLAG_CHARACTERS)
    call = TAKES_EFFECT_IN.get(name)
    remedy = f"use config.{name} before the loop of the recipe"
    if call is not None:
        remedy = f"add {call.text} to the recipe"
    return UserError(
        (
            f"{typed_flag} was set, but nothing in {recipe} had used it by the end of the first "
            "update"
        ),
        advice=f"{advice_to_omit(config, name)}, or {remedy}",
    )
