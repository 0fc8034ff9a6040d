"""Says in words who holds tensors: a variable of the recipe, an attribute, or a container."""

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

CONTAINERS = (list, dict, set, tuple, deque)
MOST_EXAMPLES = 8  # tensors whose holders are looked up
DEEPEST = 4  # containers in containers


def holder_of(examples: Sequence[object], frame: FrameType, folder: Path) -> str:
    """Return who holds objects of one kind, such as "the list `kept` of main in train.py".

    A variable may hold a single one of them by chance, such as the present batch. So several are
    looked up, and the answer is the variable that holds most of them.

    Args:
        examples: the objects.
        frame: of the code that looks; the recipe's functions are above it.
        folder: of the recipe.
    """
    names = dict(variables_above(frame, folder))
    ignored = {id(examples), *container_ids(frame, folder)}
    votes: Counter[str] = Counter()
    for number in range(min(MOST_EXAMPLES, len(examples))):
        example = examples[number * len(examples) // min(MOST_EXAMPLES, len(examples))]
        name = named_holder([example], names, ignored, DEEPEST)
        if name is not None:
            votes[name] += 1
    if votes:
        return votes.most_common(1)[0][0]
    return "no variable of the recipe: perhaps a graph of gradients, or a library"


def named_holder(
    held: Sequence[object], names: dict[int, str], ignored: set[int], depth: int
) -> str | None:
    """Return the name of a container that holds an object, directly or in other containers."""
    if depth == 0:
        return None
    ignored = ignored | {id(held)}
    referrers = [
        item
        for item in gc.get_referrers(*held)
        if isinstance(item, CONTAINERS) and id(item) not in ignored
    ]
    for item in referrers:
        if id(item) in names and len(item) > 1:
            return names[id(item)]
    if not referrers:
        return None
    return named_holder(referrers, names, ignored, depth - 1)


def container_ids(frame: FrameType, folder: Path) -> Iterator[int]:
    """Yield the ids of the containers that this tool's own functions use now."""
    caller: FrameType | None = frame
    while caller is not None:
        if not is_within(caller, folder):
            for value in [*caller.f_locals.values()]:
                if isinstance(value, CONTAINERS):
                    yield id(value)
        caller = caller.f_back


def variables_above(frame: FrameType, folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the ids and names of the containers that the recipe's functions and modules have."""
    caller: FrameType | None = frame
    while caller is not None:
        if is_within(caller, folder):
            code = caller.f_code
            place = f" of {code.co_name} in {Path(code.co_filename).name}"
            if code.co_name == "<module>":
                place = f" in {Path(code.co_filename).name}"
            for name, value in [*caller.f_locals.items()]:
                yield from containers(name, value, place)
        caller = caller.f_back
    for module in [*sys.modules.values()]:
        source = getattr(module, "__file__", None)
        if isinstance(source, str) and Path(source).resolve().parent == folder:
            for name, value in [*vars(module).items()]:
                yield from containers(name, value, f" in {Path(source).name}")


def is_within(frame: FrameType, folder: Path) -> bool:
    """Whether a frame runs code of a file in the recipe's folder."""
    return Path(frame.f_code.co_filename).resolve().parent == folder


def containers(name: str, value: Any, place: str) -> Iterator[tuple[int, str]]:
    """Yield a variable's containers: the value itself, or what its attributes hold."""
    if isinstance(value, CONTAINERS):
        yield id(value), f"the {type(value).__name__} `{name}`{place}"
    elif hasattr(value, "__dict__") and not isinstance(value, (ModuleType, type)):
        for attribute, content in [*vars(value).items()]:
            if isinstance(content, CONTAINERS):
                yield id(content), f"the {type(content).__name__} `{name}.{attribute}`{place}"
