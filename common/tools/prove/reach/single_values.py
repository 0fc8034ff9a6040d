"""Tells what a single value is: its name in words or in a path, and the state that it holds."""

import random
import types
from enum import Enum

import numpy as np
import torch
from accelerate import Accelerator

from common.config import TrainingConfig
from common.storage.value_digests import PLAIN_TYPES

MAX_BYTES = 2**24  # the largest array that is read whole; of a larger one, a sample is read
SAMPLED_ELEMENTS = 2**16  # about how many elements of a larger array are read


def is_plain(value: object) -> bool:
    """Whether a value contains no other values."""
    return isinstance(value, PLAIN_TYPES)


def key_in_path(key: object, number: int) -> str:
    """Return the text for a key of a container in a path.

    The text of an object, such as a parameter, has its values or its address, which differ between
    two runs. Such a key is named by its class and its number in the container.
    """
    parts = key if isinstance(key, tuple) else (key,)
    if all(is_plain(part) or isinstance(part, Enum) for part in parts):
        return f"{key!r:.40}"
    return f"{type(key).__name__} {number}"


def can_hold_no_state(value: object) -> bool:
    """Whether a value can't hold state of the recipe.

    A module counts as well, because `RecipeSearch` searches the recipe's modules on their own.
    """
    if isinstance(value, (types.ModuleType, TrainingConfig, Accelerator, types.FrameType)):
        return True
    return isinstance(value, (types.BuiltinFunctionType, types.CodeType, types.TracebackType))


def class_name(value: object) -> str:
    """Return the name of a value's class, such as ``numpy.ndarray``.

    The top-level package or module comes first, except for classes of the recipe's own file and
    built-in classes.
    """
    value_class = type(value)
    module = value_class.__module__.partition(".")[0]
    name = value_class.__qualname__
    return name if module in ("__main__", "builtins") else f"{module}.{name}"


def sample_of(array: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """Return an array, or evenly spaced elements of a large array."""
    if array.nbytes <= MAX_BYTES:
        return array
    flat = array.reshape(-1)
    stride = -(-len(flat) // SAMPLED_ELEMENTS)  # the quotient, rounded up
    return flat[::stride]


def state_of_random_generator(value: object) -> object:
    """Return the state of a random generator.

    The result is None for other values, and for `SystemRandom`, which has no state.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return None
