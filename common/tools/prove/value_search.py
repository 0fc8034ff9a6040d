"""Searches the values that variables contain. Each gets a path, such as ``ema.decay``.

The values of two runs are compared, to find state that checkpoints lack, or that differs between
repetitions.
"""

import io
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from common.checkpoints.state import Stateful
from common.config import TrainingConfig
from common.data.dataset import Data
from common.data.samples import Samples
from common.storage.value_digests import PLAIN_TYPES, digest_of_state
from common.tools.prove.network_values import (
    attributes_beside_state,
    attributes_of_optimizer,
    hooks_of_module,
    hooks_of_optimizer,
    path_of_submodule,
    settings_of,
    wrapped_objects,
)
from common.tools.prove.own_code import is_own_module
from common.tools.prove.positions import (
    FILES,
    contents_of_iterator,
    position_of_file,
    position_of_iterator,
)
from common.tools.prove.records.run_records import Description, ValueType

MAX_VALUES = 20_000  # the most values that a search visits
MAX_ITEMS = 2_000  # the most items of a container whose items are visited one by one
MAX_DEPTH = 12  # the most steps from a variable to a value
MAX_BYTES = 2**24  # the largest array that is read whole; of a larger one, a sample is read
SAMPLED_ELEMENTS = 2**16  # about how many elements of a larger array are read
ARRAYS = (torch.Tensor, np.ndarray)
CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
FUNCTIONS = (types.FunctionType, types.MethodType, partial)
# A method of `ValueSearch`: it gets the path, the variable's description, the value and its depth.
# Each method takes values of its own types, and `visitor_of` chooses the method by the type.
Visitor = Callable[[str, str, Any, int], None]


@dataclass
class ReachableValues:
    """The values that a search has found, by path."""

    digests: dict[str, str] = field(default_factory=dict)
    described: dict[str, Description] = field(default_factory=dict)

    def add(self, path: str, value_type: ValueType, text: str, value: object) -> None:
        """Add a value under a path, unless the path is taken.

        Args:
            text: the text of the `Description`.
            value: the value of which the digest is taken. It may be only a part of the value at the
                path, such as its state.
        """
        if path not in self.digests:
            self.digests[path] = digest_of_state(value)
            self.described[path] = Description(type=value_type, text=text)

    def mark_attributes(self, known_paths: Collection[str]) -> None:
        """Note that all new values belong to a kept object, whose state_dict lacks them.

        Args:
            known_paths: the paths of the other values. Values of special types keep their types.
        """
        for path, description in self.described.items():
            if path not in known_paths and description.type == "other":
                self.described[path] = Description(type="attribute", text=description.text)


@dataclass
class ValueSearch:
    """One search: the values that it has found, and the objects that it has visited."""

    run: object  # the recipe's run, whose attributes do not belong to the recipe
    kept: Mapping[int, str]  # names of the kept parts, by the id() of the part
    reached: ReachableValues = field(default_factory=ReachableValues)
    # The visited objects by id. The search keeps them alive, so their ids stay unique.
    visited: dict[int, object] = field(default_factory=dict)

    def visit(self, path: str, variable_text: str, value: object, depth: int) -> None:
        """Add a value, and visit the values in it.

        Args:
            variable_text: the variable at the beginning of the path, in words, such as "local
                variable of main()".
            depth: the number of steps from the variable to the value.
        """
        if is_plain(value):
            value_type: ValueType = "text" if isinstance(value, str) else "other"
            self.reached.add(path, value_type, f"{type(value).__name__}, {variable_text}", value)
            return
        if self.is_left_out(value, depth):
            return
        self.visited[id(value)] = value
        state = state_of_random_generator(value)
        if state is not None:
            text = f"random generator {class_name(value)}, {variable_text}"
            self.reached.add(path, "generator", text, state)
            return
        visit = self.visitor_of(value)
        visit(path, variable_text, value, depth)

    def is_left_out(self, value: object, depth: int) -> bool:
        """Whether a value is too deep, was visited before, or can't hold state of the recipe.

        After `MAX_VALUES` values, all others are left out.
        """
        if depth > MAX_DEPTH or len(self.visited) > MAX_VALUES or id(value) in self.visited:
            return True
        return can_hold_no_state(value) or value is self.run

    def visitor_of(self, value: object) -> Visitor:
        """Return the method that visits values of this type. The first match counts."""
        visitors: dict[tuple[type, ...], Visitor] = {
            ARRAYS: self.visit_array,
            FILES: self.visit_file,
            CONTAINERS: self.visit_container,
            (nn.Module,): self.visit_module,
            FUNCTIONS: self.visit_function,
            (types.GeneratorType,): self.visit_python_generator,
            (type,): self.visit_class,
        }
        for classes, visitor in visitors.items():
            if isinstance(value, classes):
                return visitor
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return self.visit_stateful
        if isinstance(value, Iterator) and not is_own_module(type(value).__module__):
            return self.visit_iterator
        return self.visit_object

    def visit_array(
        self, path: str, variable_text: str, value: torch.Tensor | np.ndarray, depth: int
    ) -> None:
        """Add the elements of a tensor or an array; of a large one, only a sample."""
        self.reached.add(path, "other", f"{class_name(value)}, {variable_text}", sample_of(value))

    def visit_file(self, path: str, variable_text: str, value: io.IOBase, depth: int) -> None:
        """Add the position of an open file."""
        text = f"position of an open file, {variable_text}"
        self.reached.add(path, "file", text, position_of_file(value))

    def visit_python_generator(
        self,
        path: str,
        variable_text: str,
        value: "types.GeneratorType[object, object, object]",
        depth: int,
    ) -> None:
        """Add the position of a generator.

        If its function is the recipe's, visit its local variables too.
        """
        self.visit_iterator(path, variable_text, value, depth)
        frame = value.gi_frame  # None after the end of the function
        if frame is not None and is_own_module(frame.f_globals["__name__"]):
            self.visit_all(path, variable_text, frame.f_locals, depth)

    def visit_iterator(
        self, path: str, variable_text: str, value: Iterator[object], depth: int
    ) -> None:
        """Add the position of an iterator, and visit the iterators that it reads."""
        text = f"position of an iterator {class_name(value)}, {variable_text}"
        self.reached.add(path, "iterator", text, position_of_iterator(value))
        contents = contents_of_iterator(value)
        # Only the iterators are numbered. The number of other contents changes when the search
        # reads the variables of a generator.
        iterators = [content for content in contents if isinstance(content, Iterator)]
        for number, iterator in enumerate(iterators):
            self.visit(f"{path}[{number}]", variable_text, iterator, depth + 1)

    def visit_class(self, path: str, variable_text: str, value: type, depth: int) -> None:
        """Visit the attributes of a class, if it is the recipe's own."""
        if is_own_module(value.__module__):
            attributes = {
                name: item for name, item in vars(value).items() if not name.startswith("__")
            }
            self.visit_all(path, variable_text, attributes, depth)

    def visit_all(
        self, path: str, variable_text: str, values: Mapping[str, object], depth: int
    ) -> None:
        """Visit attributes or variables by name."""
        for name, value in [*values.items()]:
            self.visit(f"{path}.{name}", variable_text, value, depth + 1)

    def visit_container(
        self, path: str, variable_text: str, value: Collection[object], depth: int
    ) -> None:
        """Add a container of plain values as a whole, and visit the items of other containers.

        Of a container of other values, add the length. If it is a set or has more than `MAX_ITEMS`
        items, do not visit its items.
        """
        items: Iterable[object] = value
        pairs: Iterable[tuple[object, object]] = enumerate(value)
        if isinstance(value, Mapping):
            items = value.values()
            pairs = value.items()
        text = f"{type(value).__name__}, {variable_text}"
        if all(map(is_plain, items)):
            # A digest of a deque would cover only its type.
            contents = [*value] if isinstance(value, deque) else value
            self.reached.add(path, "other", text, contents)
            return
        self.reached.add(path, "other", f"length of a {text}", len(value))
        if len(value) > MAX_ITEMS or isinstance(value, (set, frozenset)):
            return
        for number, (key, item) in enumerate([*pairs]):
            item_path = f"{path}[{key_in_path(key, number)}]"
            self.visit(item_path, variable_text, item, depth + 1)

    def visit_module(self, path: str, variable_text: str, module: nn.Module, depth: int) -> None:
        """Add the weights of a network that is not kept, and values that its state_dict lacks."""
        if id(module) not in self.kept:
            text = f"network {class_name(module)}, {variable_text}"
            self.reached.add(path, "network", text, module.state_dict())
        new_modules = {}
        for name, submodule in module.named_modules():
            if submodule is module or id(submodule) not in self.visited:
                new_modules[path_of_submodule(path, name)] = submodule
        # Visit no submodule or tensor of the network again: all are added here, or checkpoints hold
        # them.
        for part in [*module.modules(), *module.parameters(), *module.buffers()]:
            self.visited.setdefault(id(part), part)
        for inner_path, submodule in new_modules.items():
            self.visit_submodule(inner_path, variable_text, submodule, depth)

    def visit_submodule(self, path: str, variable_text: str, module: nn.Module, depth: int) -> None:
        """Add the values of a module alone that its state_dict lacks.

        These are buffers with persistent=False, settings such as `requires_grad`, attributes, and
        the values that hooks of the recipe keep.
        """
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                text = f"buffer of a network with persistent=False, {variable_text}"
                self.reached.add(f"{path}.{name}", "buffer", text, buffer)
        for name, (words, setting) in settings_of(module).items():
            self.reached.add(f"{path}.{name}", "setting", f"{words}, {variable_text}", setting)
        self.visit_all(path, variable_text, attributes_beside_state(module), depth)
        for hook_path, hook in hooks_of_module(path, module):
            self.visit(hook_path, f"in a hook, {variable_text}", hook, depth + 1)

    def visit_stateful(self, path: str, variable_text: str, value: Stateful, depth: int) -> None:
        """Add the state of an object that has state_dict, unless checkpoints hold it.

        In any case, visit its attributes and what it wraps, because its state_dict may lack some of
        them.
        """
        is_kept = id(value) in self.kept
        if not is_kept:
            text = f"{class_name(value)} with state_dict, {variable_text}"
            self.reached.add(path, "stateful", text, value.state_dict())
        known_paths = set(self.reached.described)
        if isinstance(value, torch.optim.Optimizer):
            self.visit_all(path, variable_text, attributes_of_optimizer(value), depth)
        else:
            self.visit_object(path, variable_text, value, depth)
        if is_kept:
            self.reached.mark_attributes(known_paths)
        if isinstance(value, torch.optim.Optimizer):
            for hook_path, hook in hooks_of_optimizer(path, value):
                self.visit(hook_path, f"in a hook, {variable_text}", hook, depth + 1)
        self.visit_all(path, variable_text, wrapped_objects(value), depth)

    def visit_function(
        self,
        path: str,
        variable_text: str,
        value: types.FunctionType | types.MethodType | partial[object],
        depth: int,
    ) -> None:
        """Visit the values that a function of the recipe keeps from call to call."""
        if isinstance(value, types.MethodType):
            self.visit(path, variable_text, value.__self__, depth)
        elif isinstance(value, partial):
            self.visit(f"{path}.func", variable_text, value.func, depth + 1)
            self.visit(f"{path}.args", variable_text, value.args, depth + 1)
            self.visit(f"{path}.keywords", variable_text, value.keywords, depth + 1)
        elif is_own_module(value.__module__ or ""):
            self.visit(f"{path}.__defaults__", variable_text, value.__defaults__, depth + 1)
            self.visit(f"{path}.__kwdefaults__", variable_text, value.__kwdefaults__, depth + 1)
            self.visit_all(path, variable_text, vars(value), depth)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    content = cell.cell_contents
                except ValueError:  # the variable has no value yet
                    continue
                self.visit(f"{path}.{name}", variable_text, content, depth + 1)

    def visit_object(self, path: str, variable_text: str, value: object, depth: int) -> None:
        """Visit the attributes of an object, if its class is the recipe's own.

        Data sets and `SimpleNamespace` are visited as well. Any other object is left out.
        """
        is_data = isinstance(value, (Data, Samples))
        is_simple = isinstance(value, types.SimpleNamespace)
        if not (is_data or is_simple or is_own_module(type(value).__module__)):
            return
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for owner in type(value).__mro__:
            slots = owner.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots  # a string is a single name
            for name in names:
                if hasattr(value, name):
                    attributes.setdefault(name, getattr(value, name))
        self.visit_all(path, variable_text, attributes, depth)


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
