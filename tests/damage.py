"""Damage for tests: other values at any place of nested JSON, broken bytes, and a pickle."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MISSING = object()  # stands for a value that is removed
WRONG: tuple[Any, ...] = (
    None,
    "text [red]|",
    "",
    -1,
    0,
    10**400,
    1e308,
    -1e-308,
    float("nan"),
    True,
    [],
    ["text"],
    [[None]],
    {},
    {"text": {"a": None}},
    MISSING,
)
Place = tuple[Any, ...]  # the keys and indexes that lead to a value inside another


def places(value: Any, at: Place = (), *, every_item: bool = True) -> Iterator[Place]:
    """Yield the place of each value inside another, at any depth, also of containers.

    Args:
        at: the place of the value itself.
        every_item: whether to yield each item of a list, or only the first and the last, because
            items are alike.
    """
    names: Iterable[Any] = ()
    if isinstance(value, dict):
        names = value
    elif isinstance(value, list):
        names = range(len(value)) if every_item else sorted({0, len(value) - 1} if value else ())
    for name in names:
        yield (*at, name)
        yield from places(value[name], (*at, name), every_item=every_item)


def with_value(value: Any, place: Place, other: Any) -> Any:
    """Return a copy of a value in which another one, or `MISSING`, is at a place.

    The empty place is that of the value itself. If that is missing, the result is {}.
    """
    whole = {"": copy.deepcopy(value)}
    holder: Any = whole
    *parents, last = ("", *place)
    for parent in parents:
        holder = holder[parent]
    if other is MISSING:
        del holder[last]
    else:
        holder[last] = copy.deepcopy(other)
    return whole.get("", {})


def wrong(
    value: Any, others: Sequence[Any] = WRONG, *, every_item: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield copies of a value with one place changed or missing, each after a description.

    Args:
        others: what each place gets, one at a time.
        every_item: as for `places`.
    """
    for place in places(value, every_item=every_item):
        for other in others:
            description = f"{place} is {'missing' if other is MISSING else repr(other)[:20]}"
            yield description, with_value(value, place, other)


def broken(whole: bytes, count: int) -> Iterator[bytes]:
    """Yield a file cut short, with a byte changed, or with a part of it gone or doubled."""
    generator = random.Random(len(whole))
    for number in range(count):
        start = generator.randrange(len(whole))
        end = start + generator.randrange(1, 20)
        match number % 4:
            case 0:
                yield whole[:start]
            case 1:
                yield whole[:start] + bytes([generator.randrange(256)]) + whole[start + 1 :]
            case 2:
                yield whole[:start] + whole[end:]
            case _:
                yield whole[:end] + whole[start:]


class Payload:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mknod, (str(self.marker),)
