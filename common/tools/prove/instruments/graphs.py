"""Measures the graphs of gradients that hang on the variables of a recipe.

A loss that is added up without `.detach()` keeps the graphs of all earlier losses. The tensors in
these graphs are held in C++, where Python's garbage collector does not see them. So the memory in
use grows, and no list of live tensors says why.
"""

from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch.autograd.graph import Node

from common.tools.prove.instruments.recipe_variables import recipe_variables

# Graphs are followed up to this size, because one that keeps growing might take long.
MAX_NODES = 200_000


def graph_sizes(frame: FrameType, folder: Path) -> dict[str, int]:
    """Return the number of nodes of the graph behind each variable of the recipe, by its name.

    Values without a graph are left out.

    Args:
        frame: the innermost running function.
        folder: the recipe's folder.
    """
    sizes = {}
    for name, value in recipe_variables(frame, folder):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            sizes[name] = sum(1 for _ in nodes_of(value.grad_fn))
    return sizes


def nodes_of(root: Node) -> Iterator[Node]:
    """Yield the nodes of a graph of gradients, at most `MAX_NODES`."""
    waiting = [root]
    visited = {root}
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited and len(visited) < MAX_NODES:
                visited.add(following)
                waiting.append(following)
