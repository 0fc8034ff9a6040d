"""Parameter groups: what decays and what does not."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters: matrices and kernels decay, biases and norms (1-d) do not.

    Decaying the latter costs accuracy; see "Bag of Tricks" (arXiv 1812.01187), section 3.1.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
