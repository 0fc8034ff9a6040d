"""Reads positions in open files and in iterators, without taking anything from them.

A proof compares the positions of two runs, to find those that a resume does not restore.
"""

import gc
import io
import itertools
import operator
import os
import types
from collections.abc import Iterator

FILES = (io.IOBase, io.TextIOBase)
MAX_NESTED_ITERATORS = 6  # the most iterators within one another whose positions are read
BUILT_IN = ("builtins", "itertools")  # modules whose iterators may know how many items are left


def position_of_file(file: io.IOBase) -> int:
    """Return the position in a file; -1 if the file is closed or has no position."""
    try:
        return int(file.tell())
    except (OSError, ValueError):
        pass
    try:  # a text file that is being read by line does not report its position
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)
    except (OSError, ValueError):
        return -1


def position_of_iterator(iterator: Iterator[object], nesting: int = 0) -> list[object]:
    """Return numbers that change when an iterator or generator yields an item.

    They are the integers that it holds, the number of items that are left, the lengths of its
    lists, and the positions of its files and of the iterators that it reads. An iterator may have
    none of these. Then the result stays the same.

    Args:
        nesting: the number of iterators around this one.
    """
    position: list[object] = [type(iterator).__qualname__]
    if type(iterator).__module__ in BUILT_IN:
        position.append(operator.length_hint(iterator, -1))
    if isinstance(iterator, itertools.count):
        position.append(repr(iterator))
    for content in contents_of_iterator(iterator):
        if isinstance(content, int):
            position.append(content)
        elif isinstance(content, list):  # `itertools.cycle` has a list of the items so far
            position.append(len(content))
        elif isinstance(content, FILES):
            position.append(position_of_file(content))
        elif isinstance(content, Iterator) and nesting < MAX_NESTED_ITERATORS:
            position.append(position_of_iterator(content, nesting + 1))
    return position


def contents_of_iterator(iterator: Iterator[object]) -> list[object]:
    """Return the values that an iterator holds, and those in its tuples.

    The values of a generator are its variables, and the iterators of its `for` statements.
    """
    if is_of_this_library(iterator):  # checkpoints hold its position
        return []
    contents: list[object] = []
    # The attributes of an object may or may not be in a dict, which changes its referents.
    has_attributes = hasattr(iterator, "__dict__")
    values = vars(iterator).values() if has_attributes else gc.get_referents(iterator)
    for value in values:
        contents.extend(value if isinstance(value, tuple) else (value,))
    return contents


def is_of_this_library(iterator: Iterator[object]) -> bool:
    """Whether a class or generator function of this library made an iterator."""
    module = type(iterator).__module__
    if isinstance(iterator, types.GeneratorType) and iterator.gi_frame is not None:
        module = str(iterator.gi_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "common"
