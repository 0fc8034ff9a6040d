"""Finds the values that a recipe's loop can reach, so that a check sees which of them change.

The search begins with the local variables of the function with the loop and of its callers, and
with the global variables of the recipe's own modules. It follows containers, objects of the
recipe's own classes, defaults and closures of its functions, modules and data sets. Each value gets
a path, such as ``ema.decay`` or ``train.COUNT``.
"""

import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from common.tools.prove.reach.own_code import callers, is_own_frame, is_own_module
from common.tools.prove.reach.reachable_values import Place, ReachableValues
from common.tools.prove.reach.value_search import ValueSearch
from common.tools.prove.records.run_records import OF_RECIPE


class RecipeSearch:
    """Searches the values that one recipe can reach, always in the same order."""

    def __init__(self, kept: Mapping[str, object], run: object) -> None:
        """Prepare the searches of one run.

        Args:
            kept: the parts that the recipe passed to `run.keep`, by name.
            run: the recipe's run. The search leaves out its attributes: they are the library's.
        """
        self.run = run
        # The names of the kept parts, by the id() of the part and of each object that it wraps.
        self.kept: dict[int, str] = {}
        for name, part in kept.items():
            for part_or_wrapped in part_and_wrapped(part):
                self.kept[id(part_or_wrapped)] = name
        # The result of the last call of `own_modules`, and how many modules were imported then.
        self.last_own_modules: dict[str, types.ModuleType] = {}
        self.module_count = 0

    def reachable_values(self, frame: types.FrameType) -> ReachableValues:
        """Return the values that the loop, its callers and the recipe's modules can reach now.

        Args:
            frame: the frame of the function with the loop.
        """
        search = ValueSearch(self.run, self.kept)
        for caller in callers(frame):
            if not is_own_frame(caller):
                continue
            function = caller.f_code.co_name
            for name, value in [*caller.f_locals.items()]:
                search.visit(Place(name, f"local variable of {function}()"), value)
        for module_name, module in self.own_modules().items():
            is_recipe = module is sys.modules["__main__"]
            variable_text = OF_RECIPE if is_recipe else f"global variable of {module_name}.py"
            for name, value in [*vars(module).items()]:
                if not name.startswith("__"):
                    search.visit(Place(f"{module_name}.{name}", variable_text), value)
        return search.reached

    def own_modules(self) -> dict[str, types.ModuleType]:
        """Return the recipe's own modules by name. The recipe itself has the name of its file.

        A call searches all imported modules only if their number has changed since the last call.
        """
        if self.module_count != len(sys.modules):
            self.module_count = len(sys.modules)
            self.last_own_modules = {}
            for name, module in [*sys.modules.items()]:
                if isinstance(module, types.ModuleType) and is_own_module(name):
                    file = getattr(module, "__file__", None)
                    shown_name = Path(file).stem if file and name == "__main__" else name
                    self.last_own_modules[shown_name] = module
        return self.last_own_modules


def part_and_wrapped(part: object) -> Iterator[object]:
    """Yield a part of a run, and each model, optimizer or scheduler inside its wrappers.

    A variable of the recipe may hold such an inner object. Checkpoints hold its state, too, as that
    of its wrapper.
    """
    yield part
    inner: object = None
    if isinstance(part, nn.Module):  # DDP has `module`, and torch.compile has `_orig_mod`
        inner = part._modules.get("module", part._modules.get("_orig_mod"))
    elif isinstance(part, AcceleratedOptimizer):
        inner = part.optimizer
    elif isinstance(part, AcceleratedScheduler):
        inner = part.scheduler
    if inner is not None:
        yield from part_and_wrapped(inner)
