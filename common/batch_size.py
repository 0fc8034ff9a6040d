"""`--auto-batch-size`: the largest micro-batch that fits every rank, of the same updates."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.console import say
from common.failures import TrainingError, is_out_of_memory
from common.flops import ComputeLoss
from common.loader import Loader
from common.meters import Meters

if TYPE_CHECKING:
    from common.run import Run


def fit_batch_size(run: Run, loaders: dict[str, Loader], compute_loss: ComputeLoss) -> None:
    """Lower the batch and raise the accumulation until every rank can hold its longest batch.

    Each rank tries without communication, so that none waits for one that ran out of memory;
    then all take the smallest size that fits. The samples of an update stay the same.

    Raises:
        TrainingError: when not even one sample fits.
    """
    config, accelerator = run.config, run.accelerator
    per_update = config.batch_size * config.gradient_accumulation_steps
    size = config.batch_size
    while not fits(run, loaders["train"], compute_loss, size):
        smaller = [n for n in range(1, size) if per_update % n == 0]
        if not smaller:
            size = 0
            break
        size = max(n for n in smaller if n <= max(1, size // 2))
    mine = torch.tensor([size], device=accelerator.device)
    size = int(accelerator.gather(mine).min())
    if size == 0:
        raise TrainingError(
            "out of memory with one sample a batch: try --gradient-checkpointing, or a smaller "
            "model or sample"
        )
    if size == config.batch_size:
        return
    say(f"batch {config.batch_size} does not fit: {size} × {per_update // size} accumulated")
    config.batch_size, config.gradient_accumulation_steps = size, per_update // size
    accelerator.gradient_accumulation_steps = config.gradient_accumulation_steps
    for loader in loaders.values():
        loader.cut_into(size, config.gradient_accumulation_steps)
    run.meters = Meters(accelerator, config.gradient_accumulation_steps)


def fits(run: Run, loader: Loader, compute_loss: ComputeLoss, size: int) -> bool:
    """Whether a forward and backward pass over the longest batch of `size` fits in memory."""
    model = run.unwrapped  # which knows of no other rank
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.train()
    try:
        reserved = [  # what the optimizer will make at its first update
            torch.empty_like(parameter)
            for parameter in model.parameters()
            for _ in range(2 if "betas" in run.optimizer.param_groups[0] else 0)
        ]
        loss, _ = compute_loss(model, loader.batch_of(longest(loader, size)))
        loss.backward()
        del loss, reserved
        return True
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        return False
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def longest(loader: Loader, size: int) -> torch.Tensor:
    """Return the indices of the `size` longest samples; of any, where all are alike."""
    lengths = loader.order.lengths
    if lengths is None:
        return torch.arange(size)
    return torch.from_numpy(np.argsort(lengths, kind="stable")[-size:].copy())
