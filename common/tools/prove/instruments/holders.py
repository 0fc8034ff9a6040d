"""Finds the variable of a recipe that holds tensors, directly or in containers."""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from common.tools.prove.instruments.recipe_variables import (
    CONTAINERS,
    is_in_folder,
    recipe_containers,
)
from common.tools.prove.reach.own_code import callers

NO_HOLDER = "no variable of the recipe: perhaps a graph of gradients, or a library"
MAX_EXAMPLES = 8  # the most objects whose holders are looked for
MAX_DEPTH = 4  # the most nested containers


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
        if not is_in_folder(caller.f_code.co_filename, folder):
            for value in [*caller.f_locals.values()]:
                if isinstance(value, CONTAINERS):
                    yield id(value)
