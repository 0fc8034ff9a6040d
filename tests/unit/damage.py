"""Damaged contents for tests: wrong values at every place, broken bytes, and a pickle."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MISSING = object()
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


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of keys and indexes to each value inside another, at any depth."""
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield (*at, name)
            yield from places(value[name], (*at, name))


def wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a value with one place changed or missing, each after a description."""
    for place in places(value):
        for other in WRONG:
            damaged = copy.deepcopy(value)
            *parents, last = place
            holder = damaged
            for parent in parents:
                holder = holder[parent]
            if other is MISSING:
                del holder[last]
            else:
                holder[last] = other
            yield f"{place} is {'missing' if other is MISSING else repr(other)[:20]}", damaged


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
