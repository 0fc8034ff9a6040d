"""Tells the user's own code from libraries. Own code is the recipe, and each module in a Python
file that belongs neither to this library, nor to an installed package, nor to Python.

A proof looks for forgotten state in the variables and objects of own code.
"""

import sys
import types
from collections.abc import Iterator
from functools import cache

from common.system.installed_code import is_in_standard_library, is_installed


def callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    """Yield a frame and its callers, the innermost first."""
    caller: types.FrameType | None = frame
    while caller is not None:
        yield caller
        caller = caller.f_back


def is_own_frame(frame: types.FrameType) -> bool:
    """Whether a frame runs a function of the user's code.

    The frame of a module does not count, because `RecipeSearch` visits global variables separately.
    """
    name = frame.f_globals.get("__name__", "")
    if frame.f_code.co_name == "<module>" or not is_own_module(name):
        return False
    # The script that runs the recipe has the name `__main__` as well, but `sys.modules` has only
    # the recipe under this name.
    return frame.f_globals is vars(sys.modules[name])


def is_own_module(name: str) -> bool:
    """Whether a module is the user's: the recipe, or a module that belongs to no library."""
    if name == "__main__":
        return True
    return is_own_file(name, getattr(sys.modules.get(name), "__file__", None))


@cache
def is_own_file(name: str, file: str | None) -> bool:
    """Whether the module `name` in a file is the user's. The file may lie in any folder."""
    # `__mp_main__` is the recipe again, as data workers import it.
    if name.partition(".")[0] in ("common", "__mp_main__"):
        return False
    if file is None or not file.endswith(".py"):
        return False
    return not (is_in_standard_library(file) or is_installed(file))
