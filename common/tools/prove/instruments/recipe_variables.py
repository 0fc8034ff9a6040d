"""Lists the variables of a recipe, the attributes of the objects in them, and the containers."""

import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

from common.tools.prove.reach.own_code import callers

Container = list[object] | dict[object, object] | set[object] | tuple[object, ...] | deque[object]
CONTAINERS = (list, dict, set, tuple, deque)


def recipe_variables(frame: FrameType, folder: Path) -> Iterator[tuple[str, object]]:
    """Yield the variables of the recipe, and the attributes of the objects in them.

    The variables are the locals of the recipe's functions that are running, and the globals of its
    modules.

    Args:
        frame: the innermost running function.
        folder: the recipe's folder.

    Yields:
        A name in words, such as "`model.scale` of main in train.py", and a value.
    """
    for caller in callers(frame):
        if is_in_folder(caller.f_code.co_filename, folder):
            code = caller.f_code
            place = f" of {code.co_name} in {Path(code.co_filename).name}"
            if code.co_name == "<module>":
                place = f" in {Path(code.co_filename).name}"
            for name, value in [*caller.f_locals.items()]:
                yield from variable_with_attributes(name, value, place)
    for module in [*sys.modules.values()]:
        source = getattr(module, "__file__", None)
        if isinstance(source, str) and is_in_folder(source, folder):
            for name, value in [*vars(module).items()]:
                yield from variable_with_attributes(name, value, f" in {Path(source).name}")


def variable_with_attributes(name: str, value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield a variable, and the attributes of the object in it, by their names in words.

    Args:
        place: the end of each name, which says where the variable is.
    """
    yield f"`{name}`{place}", value
    if hasattr(value, "__dict__") and not isinstance(value, (*CONTAINERS, ModuleType, type)):
        for attribute, content in [*vars(value).items()]:
            yield f"`{name}.{attribute}`{place}", content


def recipe_containers(frame: FrameType, folder: Path) -> Iterator[tuple[Container, str]]:
    """Yield the containers that a variable of the recipe holds, itself or as an attribute.

    Containers within other containers are left out.

    Args:
        frame: the innermost running function.
        folder: the recipe's folder.

    Yields:
        A container, and its name in words.
    """
    for name, value in recipe_variables(frame, folder):
        if isinstance(value, CONTAINERS):
            yield value, f"the {type(value).__name__} {name}"


@cache  # each update asks about the files of all imported modules
def is_in_folder(file: str, folder: Path) -> bool:
    """Whether a file of code is in the recipe's folder itself."""
    return Path(file).resolve().parent == folder
