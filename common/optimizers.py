"""Optimizers: what decays and what does not, and a first update that may be skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD zeroed momentum buffers, so that its first update may be skipped.

    The fused kernel allocates them without a value and fills them in the first update; when an
    fp16 overflow skips that one, the second would use what happened to lie in memory. From
    zeros, the first update is the same as without buffers (dampening is 0).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = buffer
