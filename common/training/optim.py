"""Optimizers and learning-rate schedules: weight decay, skipped updates, warm-up and scaling."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.console import warn
from common.errors import UserError
from common.system.devices import FusedOptimizer, honours_scaling

# A parameter group of torch's optimizers: the parameters under "params", and their options by name.
# An option may be of any type.
ParameterGroup = dict[str, Any]


def decay_groups(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Return the trainable parameters in two groups: with weight decay, and without.

    Matrices and kernels decay. Biases and norms (1-d) do not, because that costs accuracy; see "Bag
    of Tricks" (arXiv 1812.01187), section 3.1. If `weight_decay` is 0, there is one group, because
    a fused optimizer starts its kernels once for each group.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


# The schedules of `--schedule`. Each maps the remaining share of the run, from 1 after the warm-up
# to 0, to a factor of the peak learning rate. "linear" is BERT's schedule (arXiv 1810.04805), and
# with a long warm-up the one-cycle schedule of arXiv 1708.07120. "cosine" is from arXiv 1608.03983.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda share_left: share_left,
    "cosine": lambda share_left: 0.5 - 0.5 * math.cos(math.pi * share_left),
    "constant": lambda share_left: 1.0,
}


def warmup_decay(
    optimizer: Optimizer, total_steps: int, warmup_steps: int, schedule: str
) -> LambdaLR:
    """Return a scheduler: a linear warm-up over `warmup_steps`, then one of `SCHEDULES`.

    Its `step` raises a `UserError` if a parameter group was added to the optimizer afterwards.
    """
    group_count = len(optimizer.param_groups)

    def factor(step: int) -> float:
        """Return the learning rate of the update that follows `step`, as a factor of the peak."""
        if len(optimizer.param_groups) != group_count:
            raise UserError(
                f"{type(optimizer).__name__} has {len(optimizer.param_groups)} parameter groups "
                f"but had {group_count} when run.plan.schedule(optimizer, ...) was called, and the "
                "schedule has no learning rates for other groups",
                advice="pass all parameters to the optimizer when you build it, and freeze some of "
                "them at first with requires_grad_(False), as examples/freezing.py does",
            )
        if step < warmup_steps:
            # The factor is neither 0 in the first update nor 1 before the warm-up is over.
            return (step + 1) / (warmup_steps + 1)
        share_left = max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
        return SCHEDULES[schedule](share_left)

    return LambdaLR(optimizer, factor)


# The rules of `--scale-learning-rate`. Each maps the batch of an update, as a multiple of the batch
# that the learning rate is stated for, to a factor of the learning rate. "linear" suits SGD with
# warm-up (arXiv 1706.02677, up to 8,192 images). "sqrt" keeps the noise of a step (arXiv 1404.5997)
# and suits Adam (arXiv 2205.10287).
SCALES: dict[str, Callable[[float], float]] = {
    "no": lambda batch_ratio: 1.0,
    "linear": lambda batch_ratio: batch_ratio,
    "sqrt": math.sqrt,
}


def turn_off_unfit_fused_kernel(optimizer: object, device: torch.device) -> None:
    """Turn an optimizer's fused kernel off if the kernel can't skip an update on this device.

    Such a kernel would apply updates with non-finite gradients. Without the kernel, the host
    decides whether to skip, and waits for the device in each update. `run.keep` passes all its
    parts to this function, which changes nothing about objects that are not optimizers.
    """
    if not isinstance(optimizer, Optimizer):
        return
    if not any(group.get("fused") for group in optimizer.param_groups):
        return
    if honours_scaling(optimizer, device):
        return
    fused_optimizer = cast("FusedOptimizer", optimizer)
    fused_optimizer._step_supports_amp_scaling = False
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"] = False
    warn(
        f"the fused {type(optimizer).__name__} can't skip an update on {device.type}, so the run "
        "uses the unfused one, which is slower"
    )


def start_momentum(optimizer: object) -> None:
    """Give SGD zeroed momentum buffers, so that its first update can be skipped.

    SGD's fused kernel allocates the buffers uninitialised and fills them in the first update. If an
    fp16 overflow skips that update, the second update would read uninitialised memory. Other
    objects are left alone, as in `turn_off_unfit_fused_kernel`.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        # With dampening, a buffer of zeros would change the first update.
        if not group["momentum"] or group["dampening"]:
            continue
        for parameter in group["params"]:
            buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            optimizer.state[parameter]["momentum_buffer"] = buffer
