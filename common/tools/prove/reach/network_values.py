"""Finds values of a network or an optimizer that change in training and that its state_dict lacks.

Examples are attributes such as the `p` of a dropout, hooks of the recipe, whether a parameter
requires a gradient, and whether a module is in training mode.
"""

import dis
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from common.tools.prove.reach.own_code import is_own_module

# Attributes of each `nn.Module`, which its state_dict or other records cover, or that never matter.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
# Packages with modules that wrap a network. Their attributes change in each pass.
WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")
# The hooks that act in training, by the attribute that holds them.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Attributes that a scheduler gives to its optimizer.
SET_BY_SCHEDULER = frozenset({"step", "_opt_called"})
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def path_of_submodule(path: str, name: str) -> str:
    """Return the path of a submodule as Python writes it, such as ``model.body[2]``.

    Args:
        path: the path of the network.
        name: the name of the submodule in `named_modules`; empty for the network itself.
    """
    for part in name.split(".") if name else ():
        path += f"[{part}]" if part.isdigit() else f".{part}"
    return path


def attributes_beside_state(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that are neither parameters, buffers nor submodules.

    Of a library's module, leave out private attributes, because only the library sets them. A
    module that wraps a network has none that matter.
    """
    class_module = type(module).__module__
    if class_module.startswith(WRAPPERS):
        return {}
    is_own = is_own_module(class_module)
    attributes = {}
    for name, value in vars(module).items():
        if name not in TORCH_ATTRIBUTES and (is_own or not name.startswith("_")):
            attributes[name] = value
    return attributes


def settings_of(module: nn.Module) -> dict[str, tuple[str, object]]:
    """Return the settings of a module that a loop may change, each with its name in words.

    The settings of its submodules are left out.
    """
    settings: dict[str, tuple[str, object]] = {"training": ("training mode", module.training)}
    parameters = module.named_parameters(recurse=False)
    requires_grad = {name: parameter.requires_grad for name, parameter in parameters}
    if requires_grad:
        settings["requires_grad"] = ("requires_grad of the parameters", requires_grad)
    return settings


def hooks_of_module(path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the recipe's hooks of a module and of its own parameters, each with its path."""
    yield from own_hooks(path, module, MODULE_HOOKS)
    for name, parameter in module.named_parameters(recurse=False):
        yield from own_hooks(f"{path}.{name}", parameter, PARAMETER_HOOKS)


def wrapped_objects(wrapper: object) -> dict[str, object]:
    """Return what a wrapper of an optimizer or a scheduler wraps, by the name of the attribute."""
    if isinstance(wrapper, AcceleratedScheduler):
        return {"scheduler": wrapper.scheduler}
    inner = getattr(wrapper, "optimizer", None)  # accelerate uses this name
    is_wrapper = isinstance(wrapper, torch.optim.Optimizer)
    return {"optimizer": inner} if is_wrapper and isinstance(inner, torch.optim.Optimizer) else {}


def attributes_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the attributes that a recipe's own class of optimizers adds to those of its bases."""
    if not is_own_module(type(optimizer).__module__):
        return {}
    of_libraries = set(SET_BY_SCHEDULER)
    for base in type(optimizer).__mro__:
        if not is_own_module(base.__module__):
            of_libraries |= attributes_set_by(base)
    return {name: value for name, value in vars(optimizer).items() if name not in of_libraries}


@cache
def attributes_set_by(owner: type) -> frozenset[str]:
    """Return the attributes that the methods of a class set."""
    names = set()
    for method in vars(owner).values():
        code = getattr(inspect.unwrap(method), "__code__", None)
        for instruction in dis.get_instructions(code) if code is not None else ():
            if instruction.opname == "STORE_ATTR":
                names.add(str(instruction.argval))
    return frozenset(names)


def hooks_of_optimizer(path: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    """Yield the recipe's hooks of an optimizer, each with its path."""
    yield from own_hooks(path, optimizer, OPTIMIZER_HOOKS)


def own_hooks(path: str, owner: object, attributes: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yield the recipe's hooks in some attributes, each with its path.

    The number in the path counts only the recipe's hooks, because the ids that torch gives to hooks
    depend on how many others were registered in the process.
    """
    for attribute in attributes:
        hooks: Mapping[int, object] = getattr(owner, attribute, None) or {}
        recipe_hooks = [hook for hook in hooks.values() if is_own_hook(hook)]
        for number, hook in enumerate(recipe_hooks):
            yield f"{path}.{attribute}[{number}]", hook


def is_own_hook(hook: object) -> bool:
    """Whether a hook is a function or an object of the recipe's own code."""
    while isinstance(hook, partial):
        hook = hook.func
    if isinstance(hook, types.MethodType):
        hook = hook.__self__
    function_or_class = hook if isinstance(hook, types.FunctionType) else type(hook)
    return is_own_module(function_or_class.__module__ or "")
