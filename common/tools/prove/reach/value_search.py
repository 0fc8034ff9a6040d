"""Searches the values that variables contain. Each gets a path, such as ``ema.decay``.

The values of two runs are compared, to find state that checkpoints lack, or that differs between
repetitions.
"""

import io
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from common.checkpoints.part_states import Stateful
from common.data.dataset import Data
from common.data.samples import Samples
from common.data.stored_samples import StoredSamples
from common.tools.prove.reach.network_values import (
    attributes_beside_state,
    attributes_of_optimizer,
    hooks_of_module,
    hooks_of_optimizer,
    path_of_submodule,
    settings_of,
    wrapped_objects,
)
from common.tools.prove.reach.own_code import is_own_module
from common.tools.prove.reach.positions import (
    FILES,
    contents_of_iterator,
    position_of_file,
    position_of_iterator,
)
from common.tools.prove.reach.reachable_values import Place, ReachableValues
from common.tools.prove.reach.single_values import (
    can_hold_no_state,
    class_name,
    is_plain,
    key_in_path,
    sample_of,
    state_of_random_generator,
)
from common.tools.prove.records.run_records import ValueType

MAX_VALUES = 20_000  # the most values that a search visits
MAX_ITEMS = 2_000  # the most items of a container whose items are visited one by one
MAX_DEPTH = 12  # the most steps from a variable to a value
ARRAYS = (torch.Tensor, np.ndarray)
CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
FUNCTIONS = (types.FunctionType, types.MethodType, partial)

# A method of `ValueSearch`, which gets the place and the value. Each method takes values of its own
# types, and `visitor_of` chooses the method by the type.
Visitor = Callable[[Place, Any], None]


@dataclass
class ValueSearch:
    """One search: the values that it has found, and the objects that it has visited."""

    run: object  # the recipe's run, whose attributes do not belong to the recipe
    kept: Mapping[int, str]  # names of the kept parts, by the id() of the part
    reached: ReachableValues = field(default_factory=ReachableValues)
    # The visited objects by id. The search keeps them alive, so their ids stay unique.
    visited: dict[int, object] = field(default_factory=dict)

    def visit(self, place: Place, value: object) -> None:
        """Add a value, and visit the values in it."""
        if is_plain(value):
            value_type: ValueType = "text" if isinstance(value, str) else "other"
            self.reached.add(place, value_type, type(value).__name__, value)
            return
        if self.is_left_out(place, value):
            return
        self.visited[id(value)] = value
        state = state_of_random_generator(value)
        if state is not None:
            self.reached.add(place, "generator", f"random generator {class_name(value)}", state)
            return
        visit = self.visitor_of(value)
        visit(place, value)

    def is_left_out(self, place: Place, value: object) -> bool:
        """Whether a value is too deep, was visited before, or can't hold state of the recipe.

        After `MAX_VALUES` values, all others are left out.
        """
        if place.depth > MAX_DEPTH or len(self.visited) > MAX_VALUES or id(value) in self.visited:
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

    def visit_array(self, place: Place, value: torch.Tensor | np.ndarray) -> None:
        """Add the elements of a tensor or an array; of a large one, only a sample."""
        self.reached.add(place, "other", class_name(value), sample_of(value))

    def visit_file(self, place: Place, value: io.IOBase) -> None:
        """Add the position of an open file."""
        self.reached.add(place, "file", "position of an open file", position_of_file(value))

    def visit_python_generator(
        self, place: Place, value: "types.GeneratorType[object, object, object]"
    ) -> None:
        """Add the position of a generator.

        If its function is the recipe's, visit its local variables too.
        """
        self.visit_iterator(place, value)
        frame = value.gi_frame  # None after the end of the function
        if frame is not None and is_own_module(frame.f_globals["__name__"]):
            self.visit_all(place, frame.f_locals)

    def visit_iterator(self, place: Place, value: Iterator[object]) -> None:
        """Add the position of an iterator, and visit the iterators that it reads."""
        words = f"position of an iterator {class_name(value)}"
        self.reached.add(place, "iterator", words, position_of_iterator(value))
        contents = contents_of_iterator(value)
        # Only the iterators are numbered. The number of other contents changes when the search
        # reads the variables of a generator.
        iterators = [content for content in contents if isinstance(content, Iterator)]
        for number, iterator in enumerate(iterators):
            self.visit(place.item(str(number)), iterator)

    def visit_class(self, place: Place, value: type) -> None:
        """Visit the attributes of a class, if it is the recipe's own."""
        if is_own_module(value.__module__):
            attributes = {
                name: item for name, item in vars(value).items() if not name.startswith("__")
            }
            self.visit_all(place, attributes)

    def visit_all(self, place: Place, values: Mapping[str, object]) -> None:
        """Visit attributes or variables by name."""
        for name, value in [*values.items()]:
            self.visit(place.attribute(name), value)

    def visit_container(self, place: Place, value: Collection[object]) -> None:
        """Add a container of plain values as a whole, and visit the items of other containers.

        Of a container of other values, add the length. If it is a set or has more than `MAX_ITEMS`
        items, do not visit its items.
        """
        items: Iterable[object] = value
        pairs: Iterable[tuple[object, object]] = enumerate(value)
        if isinstance(value, Mapping):
            items = value.values()
            pairs = value.items()
        words = type(value).__name__
        if all(map(is_plain, items)):
            # A digest of a deque would cover only its type.
            contents = [*value] if isinstance(value, deque) else value
            self.reached.add(place, "other", words, contents)
            return
        self.reached.add(place, "other", f"length of a {words}", len(value))
        if len(value) > MAX_ITEMS or isinstance(value, (set, frozenset)):
            return
        for number, (key, item) in enumerate([*pairs]):
            self.visit(place.item(key_in_path(key, number)), item)

    def visit_module(self, place: Place, module: nn.Module) -> None:
        """Add the weights of a network that is not kept, and values that its state_dict lacks."""
        if id(module) not in self.kept:
            words = f"network {class_name(module)}"
            self.reached.add(place, "network", words, module.state_dict())
        new_modules = {}
        for name, submodule in module.named_modules():
            if submodule is module or id(submodule) not in self.visited:
                new_modules[path_of_submodule(place.path, name)] = submodule
        # Visit no submodule or tensor of the network again: all are added here, or checkpoints hold
        # them.
        for part in [*module.modules(), *module.parameters(), *module.buffers()]:
            self.visited.setdefault(id(part), part)
        for inner_path, submodule in new_modules.items():
            self.visit_submodule(replace(place, path=inner_path), submodule)

    def visit_submodule(self, place: Place, module: nn.Module) -> None:
        """Add the values of a module alone that its state_dict lacks.

        These are buffers with persistent=False, settings such as `requires_grad`, attributes, and
        the values that hooks of the recipe keep.
        """
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                words = "buffer of a network with persistent=False"
                self.reached.add(place.attribute(name), "buffer", words, buffer)
        for name, (words, setting) in settings_of(module).items():
            self.reached.add(place.attribute(name), "setting", words, setting)
        self.visit_all(place, attributes_beside_state(module))
        for hook_path, hook in hooks_of_module(place.path, module):
            self.visit(place.hook(hook_path), hook)

    def visit_stateful(self, place: Place, value: Stateful) -> None:
        """Add the state of an object that has state_dict, unless checkpoints hold it.

        In any case, visit its attributes and what it wraps, because its state_dict may lack some of
        them.
        """
        is_kept = id(value) in self.kept
        if not is_kept:
            words = f"{class_name(value)} with state_dict"
            self.reached.add(place, "stateful", words, value.state_dict())
        known_paths = set(self.reached.descriptions)
        if isinstance(value, torch.optim.Optimizer):
            self.visit_all(place, attributes_of_optimizer(value))
        else:
            self.visit_object(place, value)
        if is_kept:
            self.reached.mark_attributes(known_paths)
        if isinstance(value, torch.optim.Optimizer):
            for hook_path, hook in hooks_of_optimizer(place.path, value):
                self.visit(place.hook(hook_path), hook)
        self.visit_all(place, wrapped_objects(value))

    def visit_function(
        self, place: Place, value: types.FunctionType | types.MethodType | partial[object]
    ) -> None:
        """Visit the values that a function of the recipe keeps from call to call."""
        if isinstance(value, types.MethodType):
            self.visit(place, value.__self__)
        elif isinstance(value, partial):
            self.visit(place.attribute("func"), value.func)
            self.visit(place.attribute("args"), value.args)
            self.visit(place.attribute("keywords"), value.keywords)
        elif is_own_module(value.__module__ or ""):
            self.visit(place.attribute("__defaults__"), value.__defaults__)
            self.visit(place.attribute("__kwdefaults__"), value.__kwdefaults__)
            self.visit_all(place, vars(value))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    content = cell.cell_contents
                except ValueError:  # the variable has no value yet
                    continue
                self.visit(place.attribute(name), content)

    def visit_object(self, place: Place, value: object) -> None:
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
        if isinstance(value, StoredSamples):
            # Only the library sets this attribute, in each launch when the split is first read.
            attributes.pop("writes", None)
        self.visit_all(place, attributes)
