"""What the parts of a run are: written into each checkpoint, and compared on a resume.

A state fits many parts that it was not saved from: Adam takes AdamW's, and an optimizer takes one
whose parameter groups are in another order. So a checkpoint also says what each part was.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from common.checkpoints.kinds import Network, OptimizerState
from common.errors import UserError
from common.files import json_safe

OWN = "common."  # modules of this repository, whose classes may change with its version
# Of a parameter group: what is described by name, and the ways of computing the same update.
NOT_COMPARED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
ADVICE = "put the recipe back as it was, or start another run, with --init-from for its weights"


def describe(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each named part is, as JSON holds it; networks come first.

    Call it before the first update: a schedule may change an optimizer's momentum.

    Returns:
        The ``class`` of each; of an optimizer its ``groups`` of parameters, each with the
        ``parameters`` by name and the fixed ``options``; of a schedule its base ``rates``.
    """
    names = dict[int, str]()
    described = dict[str, Any]()
    for name, part in parts.items():
        if isinstance(part, Network):
            described[name] = {"class": class_of_network(part.module)}
            for key, parameter in part.module.named_parameters():
                names.setdefault(id(parameter), f"{name}.{key}")
    for name, part in parts.items():
        if isinstance(part, OptimizerState):
            described[name] = describe_optimizer(part.optimizer, names)
        elif not isinstance(part, Network):
            bare = getattr(part, "scheduler", part)  # of Accelerate's wrapper
            if not type(bare).__module__.startswith(OWN):
                described[name] = describe_other(bare)
    return json_safe(described)


def class_of_network(module: nn.Module) -> str:
    """Return the name of a module's class as a recipe knows it, without that of FSDP2."""
    bases = [base for base in type(module).__mro__ if base.__name__ != "FSDPModule"]
    is_sharded = len(bases) < len(type(module).__mro__)
    return bases[1 if is_sharded else 0].__qualname__


def describe_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        parameters = [
            names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
            for parameter in group["params"]
        ]
        options = {
            name: plain_value(value)
            for name, value in sorted(group.items())
            if name not in NOT_COMPARED and is_plain(value)
        }
        groups.append({"parameters": parameters, "options": options})
    return {"class": type(optimizer).__qualname__, "groups": groups}


def describe_other(part: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"class": type(part).__qualname__}
    if is_plain(rates := getattr(part, "base_lrs", None)):
        described["rates"] = plain_value(rates)
    inner = getattr(part, "_schedulers", None)  # of a schedule that is made of others
    if isinstance(inner, (list, tuple)):
        described["schedules"] = [describe_other(schedule) for schedule in inner]
    return described


def is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [plain_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def insist_on_same(path: Any, saved: Any, now: Mapping[str, Any]) -> None:
    """Raise a `UserError` that names the first difference between parts, then and now.

    What only one of them describes is passed over: an older version described less.
    """
    if not isinstance(saved, Mapping):
        return
    for name in now:
        if isinstance(saved.get(name), Mapping):
            for difference in differences(name, saved[name], now[name]):
                raise UserError(f"{path} is of another recipe: {difference}: {ADVICE}")


def differences(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a part differs from what it was."""
    if before.get("class") != now["class"]:
        yield f"{name} is of the class {now['class']} and was of {before.get('class')}"
    for key, words in (("rates", "base learning rates"), ("schedules", "inner schedules")):
        if key in before and before[key] != now.get(key):
            yield f"the {words} of {name} are {now.get(key)!s:.200} and were {before[key]!s:.200}"
    groups_before, groups = before.get("groups"), now.get("groups", [])
    if isinstance(groups_before, list) and all(isinstance(g, Mapping) for g in groups_before):
        yield from differences_of_groups(name, groups_before, groups)


def differences_of_groups(
    name: str, before: list[Mapping[str, Any]], now: list[Mapping[str, Any]]
) -> Iterator[str]:
    if len(before) != len(now):
        sizes = [
            "+".join(str(len(group.get("parameters") or ())) for group in groups)
            for groups in (now, before)
        ]
        counts = f"{len(now)} parameter groups (of {sizes[0]} parameters)"
        yield f"{name} has {counts} and had {len(before)} (of {sizes[1]})"
    for number, (then, group) in enumerate(zip(before, now, strict=False)):
        names, earlier = group["parameters"], then.get("parameters")
        if isinstance(earlier, list) and earlier != names:
            yield f"parameter group {number} of {name} {difference_of_names(earlier, names)}"
        options, saved = group["options"], then.get("options")
        known = saved if isinstance(saved, Mapping) else {}
        for option in options:
            if option in known and known[option] != options[option]:
                values = f"{options[option]!s:.100} and was {known[option]!s:.100}"
                yield f"{option} in parameter group {number} of {name} is {values}"


def difference_of_names(before: list[Any], now: list[str]) -> str:
    """Say where two lists of parameters differ first."""
    for position, (then, name) in enumerate(zip(before, now, strict=False)):
        if then != name:
            return f"has {name!s:.100} at place {position}, where {then!s:.100} was"
    return f"has {len(now)} parameters and had {len(before)}"
