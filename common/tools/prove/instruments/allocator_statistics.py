"""Asks the C library how much memory its allocator has given out. Only glibc tells it."""

import ctypes
from collections.abc import Callable
from functools import cache


class AllocatorStatistics(ctypes.Structure):
    """The figures that glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@cache
def allocator_function() -> Callable[[], AllocatorStatistics] | None:
    """Return `mallinfo2` of the C library; None if the library lacks it."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = AllocatorStatistics
    return function


def bytes_in_use() -> int | None:
    """Return the bytes that the C library's allocator has given out; None if they are unknown."""
    function = allocator_function()
    if function is None:
        return None
    figures = function()
    in_heaps = int(figures.uordblks)
    in_mapped_blocks = int(figures.hblkhd)  # large blocks, each with a mapping of its own
    return in_heaps + in_mapped_blocks
