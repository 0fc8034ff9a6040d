"""Finds the variable of a recipe that holds tensors, directly or in containers."""

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as tree

from common.tools.prove.reach.own_code import callers

Container = list[object] | dict[object, object] | set[object] | tuple[object, ...] | deque[object]
CONTAINERS = (list, dict, set, tuple, deque)
NO_HOLDER = "no variable of the recipe: perhaps a graph of gradients, or a library"
MAX_EXAMPLES = 8  # the most objects whose holders are looked for
MAX_DEPTH = 4  # the most nested containers
# A container with more items is data that the recipe reads, and takes too long to search.
MAX_SEARCHED_ITEMS = 10_000


class ContainerSize(NamedTuple):
    """The number of items of a container, and the size of its first item."""

    item_count: int
    item_bytes: int  # without what the item refers to; an array of NumPy includes its values


def holder_in_words(objects: Sequence[object], frame: FrameType, folder: Path) -> str:
    """Return the variable that holds most of some objects, such as "the list `kept` in train.py".

    The check of memory asks this about objects that become more and more. A variable may hold a
    single object by chance, such as the current batch. So this function finds the holders of
    several of the objects, and returns the most frequent one.

    Args:
        objects: the objects. The variable with this sequence itself does not count as a holder.
        frame: the frame of the caller. The recipe's functions are among the frames above it.
        folder: the recipe's folder.
    """
    names = {id(container): name for container, name in recipe_containers(frame, folder)}
    ignored = {id(objects), *container_ids(frame, folder)}
    votes: Counter[str] = Counter()
    count = min(MAX_EXAMPLES, len(objects))
    for number in range(count):
        example = objects[number * len(objects) // count]  # the examples are evenly spaced
        name = name_of_holder([example], names, ignored, MAX_DEPTH)
        if name is not None:
            votes[name] += 1
    if votes:
        return votes.most_common(1)[0][0]
    return NO_HOLDER


def name_of_holder(
    objects: Sequence[object], names: dict[int, str], ignored: set[int], depth: int
) -> str | None:
    """Return the name of a container that holds one of the objects, directly or in containers.

    The result is None if no container with a name and several items holds one of them.

    Args:
        objects: the objects.
        names: the names of the recipe's containers, by id.
        ignored: the ids of containers that do not count.
        depth: how many levels of containers are still searched.
    """
    if depth == 0:
        return None
    ignored = ignored | {id(objects)}
    referrers = [
        item
        for item in gc.get_referrers(*objects)
        if isinstance(item, CONTAINERS) and id(item) not in ignored
    ]
    for item in referrers:
        # A container of one item, such as the current batch, does not hold what grows.
        if id(item) in names and len(item) > 1:
            return names[id(item)]
    if not referrers:
        return None
    return name_of_holder(referrers, names, ignored, depth - 1)


def container_ids(frame: FrameType, folder: Path) -> Iterator[int]:
    """Yield the ids of the containers in the local variables of functions outside the recipe.

    They do not count as holders, because they hold tensors only for a moment. One of them is the
    list of all live tensors that the measurement makes.
    """
    for caller in callers(frame):
        if not is_within(caller, folder):
            for value in [*caller.f_locals.values()]:
                if isinstance(value, CONTAINERS):
                    yield id(value)


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


def container_sizes(frame: FrameType, folder: Path) -> dict[str, ContainerSize]:
    """Return the size of each container of the recipe, by its name in words.

    Args:
        frame: the innermost running function.
        folder: the recipe's folder.
    """
    sizes = {}
    for container, name in recipe_containers(frame, folder):
        values = container.values() if isinstance(container, dict) else container
        item = next(iter(values), None)
        sizes[name] = ContainerSize(item_count=len(container), item_bytes=sys.getsizeof(item))
    return sizes


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
        if is_within(caller, folder):
            code = caller.f_code
            place = f" of {code.co_name} in {Path(code.co_filename).name}"
            if code.co_name == "<module>":
                place = f" in {Path(code.co_filename).name}"
            for name, value in [*caller.f_locals.items()]:
                yield from variable_with_attributes(name, value, place)
    for module in [*sys.modules.values()]:
        source = getattr(module, "__file__", None)
        if isinstance(source, str) and Path(source).resolve().parent == folder:
            for name, value in [*vars(module).items()]:
                yield from variable_with_attributes(name, value, f" in {Path(source).name}")


def tensors_in_bounded_deques(frame: FrameType, folder: Path) -> Iterator[torch.Tensor]:
    """Yield the tensors that a recipe keeps in a `deque` with a `maxlen`, also within tuples.

    Their number is bounded, so the check of memory does not count them.

    Args:
        frame: the innermost running function.
        folder: the recipe's folder.
    """
    for container, _ in recipe_containers(frame, folder):
        if is_bounded(container):
            for leaf in tree.tree_leaves([*container]):
                if isinstance(leaf, torch.Tensor):
                    yield leaf


def is_bounded(container: Container) -> bool:
    """Whether the number of a container's items has a limit."""
    return isinstance(container, deque) and container.maxlen is not None


def bytes_of_arrays(frame: FrameType, folder: Path) -> int:
    """Return the bytes of the NumPy arrays that the recipe keeps in containers, also nested ones.

    Python can list all live tensors, but not all live arrays. The arrays in a `deque` with a
    `maxlen` are left out, because their number is bounded.

    Args:
        frame: the innermost running function.
        folder: the recipe's folder.
    """
    sizes = {}
    for container, _ in recipe_containers(frame, folder):
        if len(container) > MAX_SEARCHED_ITEMS or is_bounded(container):
            continue
        for leaf in tree.tree_leaves(container):
            if isinstance(leaf, np.ndarray):
                owner = owner_of_values(leaf)
                sizes[id(owner)] = sys.getsizeof(owner)
    return sum(sizes.values())


def owner_of_values(array: np.ndarray) -> np.ndarray:
    """Return the array whose values a view shows; an array that is no view is returned itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def is_within(frame: FrameType, folder: Path) -> bool:
    """Whether the code of a frame is in a file of the recipe's folder."""
    return Path(frame.f_code.co_filename).resolve().parent == folder


def variable_with_attributes(name: str, value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield a variable, and the attributes of the object in it, by their names in words.

    Args:
        place: the end of each name, which says where the variable is.
    """
    yield f"`{name}`{place}", value
    if hasattr(value, "__dict__") and not isinstance(value, (*CONTAINERS, ModuleType, type)):
        for attribute, content in [*vars(value).items()]:
            yield f"`{name}.{attribute}`{place}", content
