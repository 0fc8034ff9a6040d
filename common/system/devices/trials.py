"""Capabilities that torch can't be asked for: each is tried once, and the result is remembered."""

import functools
from collections.abc import Callable
from typing import ParamSpec

# What torch raises if a device does not support something. The type differs by backend: float64 on
# MPS, for example, raises a TypeError.
UNSUPPORTED_ERRORS = (
    AttributeError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

# The results of `tried_once` functions, by the function's name and its arguments.
ANSWERS: dict[tuple[object, ...], bool] = {}
Arguments = ParamSpec("Arguments")


def tried_once(function: Callable[Arguments, bool]) -> Callable[Arguments, bool]:
    """Return a function that calls `function` once for the same arguments, and keeps its result.

    A trial takes time on the device. Only positional arguments tell calls apart. The results are in
    `ANSWERS` rather than in `functools.cache`, so that tests can replace them.
    """

    @functools.wraps(function)
    def remembered(*arguments: Arguments.args, **named: Arguments.kwargs) -> bool:
        key = (function.__name__, *arguments)
        if key not in ANSWERS:
            ANSWERS[key] = function(*arguments, **named)
        return ANSWERS[key]

    return remembered
