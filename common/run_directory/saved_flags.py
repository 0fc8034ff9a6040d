"""Compares the flags that a run has saved with those of a command, and words the differences."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.flags import as_typed, role_of, spelled
from common.system.wording import shortened

MAX_CHARACTERS = 99  # characters of a value that a sentence repeats


@dataclass(frozen=True)
class FlagDifference:
    """A flag whose current value differs from its saved value."""

    name: str  # the name of the field in the recipe's `Config`
    saved: object
    current: object


def differing_flags(
    saved: Mapping[str, object],
    current: Mapping[str, object],
    *,
    given_flags: Mapping[str, object] | None = None,
    is_saved_auto_fine: bool = False,
    is_current_auto_fine: bool = False,
    is_moved_data_fine: bool = False,
) -> list[FlagDifference]:
    """Return the flags, of those in both mappings, whose values differ.

    Both mappings must hold values of the same types, because a tuple differs from a list of the
    same items.

    Args:
        given_flags: for each flag, a further current value that is accepted: the value that the
            run's first command stated. None accepts no further values.
        is_saved_auto_fine: whether a saved ``auto`` fits any current value.
        is_current_auto_fine: whether a current ``auto`` fits any saved value.
        is_moved_data_fine: whether ``dataset`` may differ if the data set `has_moved`.
    """
    differences = []
    for name in sorted(saved.keys() & current.keys()):
        before = saved[name]
        now = current[name]
        if now == before or (given_flags is not None and now == given_flags[name]):
            continue
        if is_saved_auto_fine and before == "auto":
            continue
        if is_current_auto_fine and now == "auto":
            continue
        if is_moved_data_fine and name == "dataset" and has_moved(before, now):
            continue
        differences.append(FlagDifference(name, before, now))
    return differences


def flags_in_words(differences: Iterable[FlagDifference], pattern: str) -> list[str]:
    """Return a phrase for each difference, with values as they are on the command line.

    Args:
        pattern: a text with ``{flag}``, ``{saved}`` and ``{current}`` in it, such as
            ``{flag} {saved} instead of {current}``.
    """
    return [
        pattern.format(
            flag=spelled(difference.name),
            saved=value_in_words(difference.saved),
            current=value_in_words(difference.current),
        )
        for difference in differences
    ]


def value_in_words(value: object) -> str:
    """Return the value of a flag for a sentence; "none" for a flag that was not given."""
    if value is None:
        return "none"
    text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return shortened(text, MAX_CHARACTERS)


def saved_flags_in_words(config_class: type, differences: Iterable[FlagDifference]) -> list[str]:
    """Return for each difference the saved flag, as it can be passed, and the current value.

    Args:
        config_class: the recipe's `Config`, which has these flags.
    """
    phrases = []
    for difference in differences:
        saved = f"no {spelled(difference.name)}"
        if difference.saved is not None:
            saved = shortened(
                as_typed(config_class, difference.name, difference.saved), MAX_CHARACTERS
            )
        current = difference.current
        is_current_known = current is not None and not isinstance(current, bool)
        instead = f" instead of {value_in_words(current)}" if is_current_known else ""
        phrases.append(f"{saved}{instead}")
    return phrases


def fixed_flags(config_class: type, flags: Mapping[str, object]) -> dict[str, object]:
    """Return those of the `flags` that a resume can't change, by their roles in `config_class`."""
    fixed: dict[str, object] = {}
    for name, value in flags.items():
        if not role_of(config_class, name).free_on_resume:
            fixed[name] = value
    return fixed


def values_in(config: object, names: Iterable[str]) -> dict[str, object]:
    """Return the values that a config has for these flags."""
    return {name: getattr(config, name) for name in names}


def has_moved(before: object, now: object) -> bool:
    """Whether a user has moved a data set, so that a resume may read it from another path.

    The answer is True if the old path is absolute and no longer exists, and the new path exists.
    The name of a data set is not an absolute path, so it counts as not moved.
    """
    is_gone = isinstance(before, str) and os.path.isabs(before) and not os.path.exists(before)
    return is_gone and isinstance(now, str) and os.path.exists(now)
