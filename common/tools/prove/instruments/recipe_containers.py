"""Measures the containers of a recipe: their items, and the tensors and arrays in them."""

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as tree

from common.tools.prove.instruments.recipe_variables import Container, recipe_containers

# A container with more items is data that the recipe reads, and takes too long to search.
MAX_SEARCHED_ITEMS = 10_000


class ContainerSize(NamedTuple):
    """The number of items of a container, and the size of its first item."""

    item_count: int
    item_bytes: int  # without what the item refers to; an array of NumPy includes its values


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
