"""Finds the values that a recipe's loop can reach, to see which of them change during training.

The search begins with the local variables of the function that has the loop, of the functions that
called it, and with the global variables of the recipe's own modules. It follows containers, objects
of the recipe's own classes, defaults and closures of its functions, modules and data sets. Each
value gets a path, such as ``ema.decay`` or ``train.COUNT``.
"""

import io
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from common.config import TrainingConfig
from common.data.batch import Data, Samples
from common.system.installed_code import is_in_standard_library, is_installed
from common.tools.prove.digests import PLAIN_TYPES, digest_of_state
from common.tools.prove.observation import Description, ValueType

MOST_VALUES = 20_000  # that a search visits
MOST_ITEMS = 2_000  # of a container that are visited one by one
DEEPEST = 12  # steps from a variable
MOST_BYTES = 2**24  # of an array; of a larger one, a sample of its elements counts
SAMPLED = 2**16  # elements of a large array that count
# Attributes of `nn.Module` that its state_dict or other records have, or that never matter.
OF_TORCH = frozenset(vars(nn.Module())) | {"training"}

ARRAYS = (torch.Tensor, np.ndarray)
FILES = (io.IOBase, io.TextIOBase)
CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
FUNCTIONS = (types.FunctionType, types.MethodType, partial)


@dataclass
class ReachableValues:
    """What a search has found, by path."""

    digests: dict[str, str] = field(default_factory=dict)
    described: dict[str, Description] = field(default_factory=dict)

    def add(self, path: str, value_type: ValueType, text: str, value: object) -> None:
        """Note a value under a path, unless the path is taken.

        Args:
            text: see `Description`.
            value: what the digest is of.
        """
        if path not in self.digests:
            self.digests[path] = digest_of_state(value)
            self.described[path] = Description(type=value_type, text=text)


class Reach:
    """Searches the values within reach of one recipe, always in the same order."""

    def __init__(self, kept: Mapping[str, object], run: object) -> None:
        """Prepare a search.

        Args:
            kept: the parts that the recipe passed to `run.keep`, by name.
            run: the recipe's run. Nothing behind it belongs to the recipe, apart from its data.
        """
        self.run = run
        self.kept: dict[int, str] = {}  # names of kept objects and of what they wrap, by id
        for name, part in kept.items():
            for wrapped in with_wrapped_parts(part):
                self.kept[id(wrapped)] = name
        self.module_count = 0
        self.own: dict[str, types.ModuleType] = {}

    def look(self, frame: types.FrameType) -> ReachableValues:
        """Search from the frame of the loop."""
        search = Search(self, ReachableValues())
        for caller in callers(frame):
            if not is_own_frame(caller):
                continue
            function = caller.f_code.co_name
            for name, value in [*caller.f_locals.items()]:
                search.visit(name, f"local variable of {function}()", value, 0)
        for module_name, module in self.own_modules().items():
            for name, value in [*vars(module).items()]:
                if not name.startswith("__"):
                    search.visit(
                        f"{module_name}.{name}", f"global variable of {module_name}.py", value, 0
                    )
        return search.reached

    def own_modules(self) -> dict[str, types.ModuleType]:
        """Return the recipe's own modules by name; the recipe itself has the name of its file."""
        if self.module_count != len(sys.modules):
            self.module_count = len(sys.modules)
            self.own = {}
            for name, module in [*sys.modules.items()]:
                if isinstance(module, types.ModuleType) and is_own_module(name):
                    file = getattr(module, "__file__", None)
                    self.own[Path(file).stem if file and name == "__main__" else name] = module
        return self.own


def callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    """Yield a frame and those that called it, the innermost first."""
    caller: types.FrameType | None = frame
    while caller is not None:
        yield caller
        caller = caller.f_back


def is_own_frame(frame: types.FrameType) -> bool:
    """Whether a frame runs a function of the user's code.

    The frame of a module itself does not count: `Reach.look` visits global variables elsewhere.
    """
    name = frame.f_globals.get("__name__", "")
    if frame.f_code.co_name == "<module>" or not is_own_module(name):
        return False
    # The script that runs the recipe has the name `__main__` as well, but `sys.modules` has only
    # the recipe under this name.
    return frame.f_globals is vars(sys.modules[name])


def is_own_module(name: str) -> bool:
    """Whether a module is the user's: the recipe, or one that is no installed library."""
    if name == "__main__":
        return True
    return is_own_file(name, getattr(sys.modules.get(name), "__file__", None))


@cache
def is_own_file(name: str, file: str | None) -> bool:
    """Whether the module `name` in a file is the user's."""
    # Wider than `own_modules` of `common.flag_uses`: a module in any folder may hold state.
    if name.partition(".")[0] in ("common", "__mp_main__"):
        return False
    if file is None or not file.endswith(".py"):
        return False
    return not (is_in_standard_library(file) or is_installed(file))


def with_wrapped_parts(part: object) -> Iterator[object]:
    """Yield a part of a run, and the model, optimizer or scheduler that it wraps."""
    yield part
    inner: object = None
    if isinstance(part, nn.Module):  # DDP and torch.compile use these names
        inner = part._modules.get("module", part._modules.get("_orig_mod"))
    elif isinstance(part, AcceleratedOptimizer):
        inner = part.optimizer
    elif isinstance(part, AcceleratedScheduler):
        inner = part.scheduler
    if inner is not None:
        yield from with_wrapped_parts(inner)


@dataclass
class Search:
    """One search: what it has found, and which objects it has met."""

    reach: Reach
    reached: ReachableValues
    met: dict[int, object] = field(default_factory=dict)  # keeps them alive, so ids stay unique

    def visit(self, path: str, where: str, value: Any, depth: int) -> None:
        """Note a value and what it holds.

        Args:
            where: which variable the path begins with.
            depth: how many steps the value is from the variable.
        """
        if is_plain(value):
            value_type: ValueType = "text" if isinstance(value, str) else "other"
            self.reached.add(path, value_type, f"{type(value).__name__}, {where}", value)
            return
        if self.is_left_out(value, depth):
            return
        self.met[id(value)] = value
        state = state_of_generator(value)
        if state is not None:
            text = f"random generator {kind_of(value)}, {where}"
            self.reached.add(path, "generator", text, state)
            return
        visit = self.visitor_of(value)
        visit(path, where, value, depth)

    def is_left_out(self, value: object, depth: int) -> bool:
        """Whether a value is too far away, was met before, or has no state of the recipe's."""
        if depth > DEEPEST or len(self.met) > MOST_VALUES or id(value) in self.met:
            return True
        return is_foreign(value) or value is self.reach.run

    def visitor_of(self, value: object) -> Callable[[str, str, Any, int], None]:
        """Return the method that visits values of this type; the first that fits counts."""
        visitors: tuple[tuple[tuple[type, ...], Callable[[str, str, Any, int], None]], ...] = (
            (ARRAYS, self.visit_array),
            (FILES, self.visit_file),
            (CONTAINERS, self.visit_container),
            ((nn.Module,), self.visit_module),
            (FUNCTIONS, self.visit_function),
            ((types.GeneratorType,), self.visit_suspended),
            ((type,), self.visit_class),
        )
        for classes, visitor in visitors:
            if isinstance(value, classes):
                return visitor
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return self.visit_stateful
        return self.visit_object

    def visit_array(self, path: str, where: str, value: Any, depth: int) -> None:
        """Note the elements of a tensor or an array."""
        self.reached.add(path, "other", f"{kind_of(value)}, {where}", sample_of(value))

    def visit_file(self, path: str, where: str, value: Any, depth: int) -> None:
        """Note how far an open file has been read."""
        text = f"position of an open file, {where}"
        self.reached.add(path, "file", text, position_of(value))

    def visit_suspended(
        self, path: str, where: str, value: "types.GeneratorType[Any, Any, Any]", depth: int
    ) -> None:
        """Visit the local variables of a generator function of the recipe's."""
        frame = value.gi_frame  # None after its end
        if frame is not None and is_own_module(frame.f_globals["__name__"]):
            self.visit_all(path, where, frame.f_locals, depth)

    def visit_class(self, path: str, where: str, value: type, depth: int) -> None:
        """Visit the attributes of a class of the recipe's."""
        if is_own_module(value.__module__):
            own_values = {name: item for name, item in vars(value).items() if name[:2] != "__"}
            self.visit_all(path, where, own_values, depth)

    def visit_all(self, path: str, where: str, values: Mapping[str, Any], depth: int) -> None:
        """Visit attributes by name."""
        for name, value in [*values.items()]:
            self.visit(f"{path}.{name}", where, value, depth + 1)

    def visit_container(self, path: str, where: str, value: Any, depth: int) -> None:
        """Note a container of plain values as a whole, and visit the items of any other."""
        items = value.values() if isinstance(value, Mapping) else value
        description = f"{type(value).__name__}, {where}"
        if all(map(is_plain, items)):
            contents = [*value] if isinstance(value, deque) else value
            self.reached.add(path, "other", description, contents)
            return
        self.reached.add(path, "other", f"length of a {description}", len(value))
        if len(value) > MOST_ITEMS or isinstance(value, (set, frozenset)):
            return
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in [*pairs]:
            self.visit(f"{path}[{key!r:.40}]", where, item, depth + 1)

    def visit_module(self, path: str, where: str, module: nn.Module, depth: int) -> None:
        """Note the weights of a network that no checkpoint has, and what no state_dict has."""
        is_kept = id(module) in self.reach.kept
        if not is_kept:
            description = f"network {kind_of(module)}, {where}"
            self.reached.add(path, "network", description, module.state_dict())
        for name, submodule in module.named_modules():
            self.met[id(submodule)] = submodule
            inner_path = f"{path}.{name}" if name else path
            for buffer_name in sorted(submodule._non_persistent_buffers_set):
                buffer = submodule._buffers.get(buffer_name)
                if buffer is not None:
                    self.reached.add(
                        f"{inner_path}.{buffer_name}",
                        "buffer",
                        f"buffer of a network with persistent=False, {where}",
                        buffer,
                    )
            if is_own_module(type(submodule).__module__):
                extra = {key: item for key, item in vars(submodule).items() if key not in OF_TORCH}
                self.visit_all(inner_path, where, extra, depth)
        for tensor in [*module.parameters(), *module.buffers()]:
            self.met.setdefault(id(tensor), tensor)  # noted above, or in checkpoints

    def visit_stateful(self, path: str, where: str, value: Any, depth: int) -> None:
        """Note the state of an object that could be kept, and is not; visit its attributes."""
        if id(value) not in self.reach.kept:
            text = f"{kind_of(value)} with state_dict, {where}"
            self.reached.add(path, "stateful", text, value.state_dict())
        if not isinstance(value, torch.optim.Optimizer):
            self.visit_object(path, where, value, depth)

    def visit_function(self, path: str, where: str, value: Any, depth: int) -> None:
        """Visit what a function of the recipe holds from call to call."""
        if isinstance(value, types.MethodType):
            self.visit(path, where, value.__self__, depth)
        elif isinstance(value, partial):
            self.visit(f"{path}.func", where, value.func, depth + 1)
            self.visit(f"{path}.args", where, value.args, depth + 1)
            self.visit(f"{path}.keywords", where, value.keywords, depth + 1)
        elif is_own_module(value.__module__ or ""):
            self.visit(f"{path}.__defaults__", where, value.__defaults__, depth + 1)
            self.visit(f"{path}.__kwdefaults__", where, value.__kwdefaults__, depth + 1)
            self.visit_all(path, where, vars(value), depth)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    content = cell.cell_contents
                except ValueError:  # it is empty so far
                    continue
                self.visit(f"{path}.{name}", where, content, depth + 1)

    def visit_object(self, path: str, where: str, value: Any, depth: int) -> None:
        """Visit the attributes of an object of the recipe's own class, or of a data set."""
        is_data = isinstance(value, (Data, Samples))
        is_simple = isinstance(value, types.SimpleNamespace)
        if not (is_data or is_simple or is_own_module(type(value).__module__)):
            return
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for owner in type(value).__mro__:
            slots = owner.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    attributes.setdefault(name, getattr(value, name))
        self.visit_all(path, where, attributes, depth)


def is_plain(value: object) -> bool:
    """Whether a value holds no other values."""
    return isinstance(value, PLAIN_TYPES)


def is_foreign(value: object) -> bool:
    """Whether a value can hold no state of the recipe's."""
    if isinstance(value, (types.ModuleType, TrainingConfig, Accelerator, types.FrameType)):
        return True
    return isinstance(value, (types.BuiltinFunctionType, types.CodeType, types.TracebackType))


def kind_of(value: object) -> str:
    """Return the name of a value's class, with its module if it is a library's."""
    value_class = type(value)
    module = value_class.__module__.partition(".")[0]
    name = value_class.__qualname__
    return name if module in ("__main__", "builtins") else f"{module}.{name}"


def sample_of(array: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """Return an array, or evenly spaced elements of a large one."""
    if array.nbytes <= MOST_BYTES:
        return array
    flat = array.reshape(-1)
    stride = -(-len(flat) // SAMPLED)
    return flat[::stride]


def state_of_generator(value: object) -> object:
    """Return the state of a random generator object; None if it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return None


def position_of(file: Any) -> int:
    """Return how far a file has been read or written; -1 if it is closed or has no position."""
    try:
        return int(file.tell())
    except (OSError, ValueError):
        pass
    try:  # a text file that is read by line does not tell its position
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)
    except (OSError, ValueError):
        return -1
