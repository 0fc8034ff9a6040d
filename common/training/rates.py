"""Learning rates as they are logged: of each group of parameters, and of each optimizer."""

from collections.abc import Mapping
from typing import Any

RATE = "train/learning_rate"


def learning_rates(optimizers: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates to log, by their full names; the first optimizer is the main one.

    ``train/learning_rate`` is the rate of its first group. A further group is logged where its
    rate, now or before any schedule, is another than the first group's: by the name in the group
    (``{"params": …, "name": "head"}``: ``train/learning_rate/head``), or else by its number. Of any
    other optimizer the first group is ``train/learning_rate/NAME``, with the name that `run.keep`
    was given, and its further groups are ``train/learning_rate/NAME/GROUP``.
    """
    rates: dict[str, float] = {}
    for number, (name, optimizer) in enumerate(optimizers.items()):
        prefix = f"{RATE}/{name}" if number else RATE
        rates[prefix] = float(optimizer.param_groups[0]["lr"])
        for group, rate in further_rates(optimizer.param_groups).items():
            rates.setdefault(f"{prefix}/{group}", rate)
    return rates


def further_rates(groups: list[dict[str, Any]]) -> dict[str, float]:
    """Return the rates of the groups that differ from the first one, by name or number."""
    rates: dict[str, float] = {}
    for number, group in enumerate(groups):
        if both_rates(group) == both_rates(groups[0]):
            continue
        name = str(group.get("name", number))
        if name in rates:
            name = f"{name}-{number}"
        rates[name] = float(group["lr"])
    return rates


def both_rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return a group's rate, and the one that its schedule starts from."""
    rate = float(group["lr"])
    return rate, float(group.get("initial_lr", rate))
