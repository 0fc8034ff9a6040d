"""Learning rates by optimizer step: warm-up, then decay."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_decay(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int,
    shape: Literal["linear", "cosine"],
) -> LambdaLR:
    """Raise the rate linearly over `warmup_steps`, then let it fall to 0 at `total_steps`.

    The linear shape is the one of BERT (arXiv 1810.04805); a long warm-up with a fall makes the
    one-cycle schedule of arXiv 1708.07120; the cosine is that of arXiv 1608.03983.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        left = max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
        return left if shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)

    return LambdaLR(optimizer, factor)
