"""Learning rates as they are logged: of each group of parameters, and of each optimizer."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from common.metric_names import LEARNING_RATE
from common.training.optim import ParameterGroup


def learning_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """Return the learning rates to log, by the full names of their metrics.

    The first optimizer is the main optimizer. Its first parameter group is ``train/learning_rate``.
    Its further groups are ``train/learning_rate/GROUP``. The first group of any other optimizer is
    ``train/learning_rate/NAME``, and further groups are ``train/learning_rate/NAME/GROUP``.

    - NAME is the name that `run.keep` was given.
    - GROUP is the name in the group, as in ``{"params": …, "name": "head"}``, or its number.
    - A further group is logged only if its current or its initial rate differs from the first
      group's.
    - A group without a rate is left out, for example if the optimizer finds its own rate.
    """
    rates: dict[str, float] = {}
    for number, (name, optimizer) in enumerate(optimizers.items()):
        prefix = f"{LEARNING_RATE}/{name}" if number else LEARNING_RATE
        first_group_rates = both_rates(optimizer.param_groups[0])
        if first_group_rates is not None:
            rates[prefix] = first_group_rates[0]
        for group, rate in further_rates(optimizer.param_groups).items():
            # Two rates may get the same name, for example if a group is named like another
            # optimizer. An optimizer's first group wins, because the assignment above overwrites.
            # Between further groups, the earlier one stays.
            rates.setdefault(f"{prefix}/{group}", rate)
    return rates


def further_rates(groups: Sequence[ParameterGroup]) -> dict[str, float]:
    """Return the rates of the groups that differ from the first group's, by name or number.

    Two groups differ if their current rates or their rates before any schedule differ. Otherwise a
    group would be missing from the log wherever a schedule takes all rates to 0.
    """
    rates: dict[str, float] = {}
    first_group_rates = both_rates(groups[0])
    for number, group in enumerate(groups):
        own_rates = both_rates(group)
        if own_rates is None or own_rates == first_group_rates:
            continue
        name = str(group.get("name", number))
        if name in rates:  # another group has the same name
            name = f"{name}-{number}"
        rates[name] = own_rates[0]
    return rates


def both_rates(group: ParameterGroup) -> tuple[float, float] | None:
    """Return a group's current rate, and its rate before any schedule; None without a rate."""
    rate: float | Tensor | None = group.get("lr")
    if rate is None:
        return None
    initial_rate: float | Tensor = group.get("initial_lr", rate)
    return float(rate), float(initial_rate)
