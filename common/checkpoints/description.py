"""Describes a run's parts in each checkpoint, so that a resume notices a changed recipe.

The state alone does not show all changes. Adam accepts AdamW's state, for example, and an optimizer
accepts a state whose parameter groups are in another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import nn

from common.checkpoints.adapters import Network, OptimizerState
from common.errors import UserError
from common.run_directory.records import GroupDescription, PartDescription
from common.storage.json_files import json_safe
from common.system.wording import counted

# The classes of the run's own parts, such as its progress, are in modules whose names begin with
# this. They are not described, because the classes may change with the version.
CORE_PREFIX = "common."
# Entries of a parameter group that are not compared as options: the parameters, which are described
# by name, and the choice between implementations of the same update.
NOT_COMPARED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
ADVICE = (
    "change the recipe back, or start a new run from the weights of a finished one with "
    "--init-from runs/NAME"
)


def describe_parts(parts: Mapping[str, object]) -> dict[str, PartDescription]:
    """Return a description of each part of the recipe by its name, without the run's own parts.

    Call it before the first update, because a schedule may change an optimizer's momentum.
    """
    # The names of parameters, by the parameter's id(). The networks come first, because the
    # description of an optimizer needs these names. A parameter of two networks keeps its name in
    # the first.
    names: dict[int, str] = {}
    described: dict[str, PartDescription] = {}
    for name, part in parts.items():
        if isinstance(part, Network):
            described[name] = PartDescription(class_name=class_name_of_network(part.module))
            for key, parameter in part.module.named_parameters():
                names.setdefault(id(parameter), f"{name}.{key}")
    for name, part in parts.items():
        if isinstance(part, OptimizerState):
            described[name] = describe_optimizer(part.optimizer, names)
        elif not isinstance(part, Network):
            unwrapped = getattr(part, "scheduler", part)  # Accelerate wraps a scheduler
            if not type(unwrapped).__module__.startswith(CORE_PREFIX):
                described[name] = describe_other(unwrapped)
    return described


def class_name_of_network(module: nn.Module) -> str:
    """Return the name of a module's class in the recipe, not of the subclass that FSDP2 makes."""
    # FSDP2 gives a module a new class, whose bases are `FSDPModule` and the module's own class.
    bases = [base for base in type(module).__mro__ if base.__name__ != "FSDPModule"]
    is_sharded = len(bases) < len(type(module).__mro__)
    return bases[1 if is_sharded else 0].__qualname__


def describe_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> PartDescription:
    """Return the description of an optimizer.

    Args:
        names: the names of the networks' parameters by id(). A parameter that is in none of these
            networks is described by its shape.
    """
    groups: list[GroupDescription] = []
    for group in optimizer.param_groups:
        parameters = [
            names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
            for parameter in group["params"]
        ]
        options = {
            name: plain_value(value)
            for name, value in sorted(group.items())
            if name not in NOT_COMPARED and has_plain_value(value)
        }
        groups.append(GroupDescription(parameters=parameters, options=json_safe(options)))
    return PartDescription(class_name=type(optimizer).__qualname__, groups=groups)


def describe_other(part: object) -> PartDescription:
    """Describe a schedule, or any other part that is neither a network nor an optimizer."""
    facts: dict[str, object] = {"class_name": type(part).__qualname__}
    rates = getattr(part, "base_lrs", None)
    if has_plain_value(rates):
        facts["rates"] = plain_value(rates)
    schedules = getattr(part, "_schedulers", None)  # a schedule that is made of others has these
    if isinstance(schedules, (list, tuple)):
        facts["schedules"] = [describe_other(schedule) for schedule in schedules]
    return PartDescription.model_validate(json_safe(facts))


def has_plain_value(value: object) -> bool:
    """Whether `plain_value` can express a value in JSON."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    if isinstance(value, (list, tuple)):
        return all(map(has_plain_value, value))
    return value is None or isinstance(value, (bool, int, float, str))


def plain_value(value: object) -> JsonValue:
    """Return a value that JSON can hold: for a tensor its only element, for a tuple a list."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r:.100} can't be expressed in JSON")


def require_same_parts(
    path: Path, saved: Mapping[str, PartDescription], now: Mapping[str, PartDescription]
) -> None:
    """Raise a `UserError` if the description of a part has changed; it names the first difference.

    A part that only one side has is left to `Parts.require_same_names`, whose message names it.

    Args:
        path: the checkpoint, for the message.
        saved: the descriptions in the checkpoint's manifest.
        now: the descriptions of the current parts.
    """
    names_in_both = [name for name in now if name in saved]
    # Compare the classes first, because a changed class explains most other differences, such as
    # different rates of a schedule.
    for name in names_in_both:
        class_before = saved[name].class_name
        class_now = now[name].class_name
        if class_before != class_now:
            raise UserError(
                f"{path} does not match the current recipe (the class of {name} was "
                f"{class_before}, and is {class_now} now)",
                advice=ADVICE,
            )
    for name in names_in_both:
        first_difference = next(differences(name, saved[name], now[name]), None)
        if first_difference is not None:
            raise UserError(
                f"{path} does not match the current recipe ({first_difference})",
                advice=ADVICE,
            )


def differences(name: str, before: PartDescription, now: PartDescription) -> Iterator[str]:
    """Yield a phrase for each difference between two descriptions of a part, except its class.

    What the saved description leaves out is not compared.
    """
    # Rates that JSON can't express are left out. A part without rates states None.
    if "rates" in before.model_fields_set and before.rates != now.rates:
        yield f"the base learning rates of {name} {change_in_words(before.rates, now.rates)}"
    # Compare JSON, because a message must not show a class of this library.
    schedules_before = [schedule.to_json() for schedule in before.schedules]
    schedules_now = [schedule.to_json() for schedule in now.schedules]
    if schedules_before and schedules_before != schedules_now:
        yield f"the inner schedules of {name} {change_in_words(schedules_before, schedules_now)}"
    if before.groups:
        yield from differences_of_groups(name, before.groups, now.groups)


def change_in_words(before: object, now: object) -> str:
    """Return words such as "are [0.2] but were [0.1]", in which long values are cut."""
    return f"are {now!s:.200} but were {before!s:.200}"


def differences_of_groups(
    name: str, before: Sequence[GroupDescription], now: Sequence[GroupDescription]
) -> Iterator[str]:
    """Yield a phrase for each difference between the parameter groups of an optimizer.

    The differences are in the number of groups, in their parameters, and in options that both have:
    another version of torch may know other options.
    """
    if len(before) != len(now):
        counts = f"{counted(len(now), 'parameter group')} (of {sizes_of(now)} parameters)"
        yield f"{name} has {counts} but had {len(before)} (of {sizes_of(before)})"
    for number, (group_before, group) in enumerate(zip(before, now, strict=False)):
        if group_before.parameters != group.parameters:
            difference = difference_of_names(group_before.parameters, group.parameters)
            yield f"parameter group {number} of {name} {difference}"
        for option, value in group.options.items():
            if option in group_before.options and group_before.options[option] != value:
                values = f"{value!s:.100} but was {group_before.options[option]!s:.100}"
                yield f"{option} in parameter group {number} of {name} is {values}"


def sizes_of(groups: Sequence[GroupDescription]) -> str:
    """Return the numbers of parameters in parameter groups, such as "4+2", for a message."""
    return "+".join(str(len(group.parameters)) for group in groups)


def difference_of_names(before: list[str], now: list[str]) -> str:
    """Return a phrase for the first difference between two lists of names that are not equal."""
    for position, (name_before, name) in enumerate(zip(before, now, strict=False)):
        if name_before != name:
            return f"has {name:.100} at position {position} instead of {name_before:.100}"
    return f"has {len(now)} parameters but had {len(before)}"
