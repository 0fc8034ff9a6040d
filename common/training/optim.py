"""Optimizers and schedules: what decays, a first update that may be skipped, learning rates."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.console import warn
from common.system.devices import honours_scaling


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters: matrices and kernels decay, biases and norms (1-d) do not.

    Decaying the latter costs accuracy; see "Bag of Tricks" (arXiv 1812.01187), section 3.1.
    Without decay they are one group: a fused optimizer is called once for each.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


# `--schedule`: the rate's share of its peak, by the share of the run after warm-up that is left.
# Linear is BERT's (arXiv 1810.04805), and after a long warm-up the one-cycle schedule of arXiv
# 1708.07120; the cosine is that of arXiv 1608.03983.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 - 0.5 * math.cos(math.pi * left),
    "constant": lambda left: 1.0,
}


def warmup_decay(
    optimizer: Optimizer, total_steps: int, warmup_steps: int, schedule: str
) -> LambdaLR:
    """Raise the rate linearly over `warmup_steps`, then follow one of `SCHEDULES`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        left = max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
        return SCHEDULES[schedule](left)

    return LambdaLR(optimizer, factor)


# `--scale-learning-rate`: the rate's factor, by how many times its batch an update has. Linear is
# SGD's, with warm-up (arXiv 1706.02677, to 8,192 images); the root keeps the noise of a step (arXiv
# 1404.5997), and is what Adam's step takes (arXiv 2205.10287).
SCALES: dict[str, Callable[[float], float]] = {
    "no": lambda times: 1.0,
    "linear": lambda times: times,
    "sqrt": math.sqrt,
}


def leave_unfit_fused_path(optimizer: Any, device: torch.device) -> None:
    """Have an optimizer step without its fused kernel on a device where that ignores skipping.

    Such a kernel applies updates with non-finite gradients. Without it, the host decides, which
    waits for the device in each update.
    """
    if not isinstance(optimizer, Optimizer):
        return
    if not any(group.get("fused") for group in optimizer.param_groups):
        return
    if honours_scaling(optimizer, device):
        return
    stepping: Any = optimizer
    stepping._step_supports_amp_scaling = False
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"] = False
    warn(
        f"the fused {type(optimizer).__name__} of {device.type} can't skip an update: using the "
        "unfused one, which is slower"
    )


def start_momentum(optimizer: Optimizer) -> None:
    """Give SGD zeroed momentum buffers, so that its first update may be skipped.

    The fused kernel allocates them without a value and fills them in the first update; when an
    fp16 overflow skips that one, the second would use what happened to lie in memory.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["momentum"] and not group["dampening"]:  # else zeros would change the first
            for parameter in group["params"]:
                buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = buffer
