"""Has an optimizer skip its next step, on the device if its kernels can do so."""

from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.optim import Optimizer

from common.checkpoints.adapters import bare_optimizer
from common.system.devices import FusedOptimizer


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of an optimizer, which Accelerate may have wrapped."""
    for group in bare_optimizer(optimizer).param_groups:
        yield from group["params"]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step obeys `found_inf`, as fused kernels do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def remove_mark(optimizer: Optimizer, *unused: object) -> None:
    """Let the optimizer's next step update again; torch calls this after each step."""
    cast("FusedOptimizer", optimizer).found_inf = None


def drop_gradients_at_next_step(optimizer: Optimizer) -> None:
    """Remove the gradients just before the optimizer's next step, which then updates nothing.

    They are not removed at once, because the recipe may change or add gradients after clipping.
    The step must not apply those either.
    """
    is_dropped = False

    def drop(optimizer: Optimizer, *unused: object) -> None:
        # torch goes through the hooks now, so this one stays, and does nothing in later steps.
        nonlocal is_dropped
        if is_dropped:
            return
        is_dropped = True
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    optimizer.register_step_pre_hook(drop)
