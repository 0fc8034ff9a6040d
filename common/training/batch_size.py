"""The largest micro-batch that fits every rank, and what to do where none was looked for."""

import gc
import shlex
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from common.config import TrainingConfig
from common.data.loader import Loader
from common.errors import TrainingError, is_out_of_memory
from common.measure.flops import ComputeLoss


def fit_batch_size(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    compute_loss: ComputeLoss,
    config: TrainingConfig,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> int:
    """Return the largest micro-batch that divides the update and of which all ranks hold one.

    Each rank tries without communication, on the bare model, so that none waits for one that ran
    out of memory; then all take the smallest size that fits.
    """
    states = 2 if "betas" in optimizer.param_groups[0] else 0  # which it will make of each weight

    def fits(size: int) -> bool:
        """Try a forward and backward pass over the longest samples."""
        buffers = [buffer.clone() for buffer in model.buffers()]
        model.train()
        try:
            reserved = [torch.empty_like(p) for p in model.parameters() for _ in range(states)]
            lengths = loader.order.lengths
            longest = np.arange(size) if lengths is None else np.argsort(lengths)[-size:].copy()
            loss, _ = compute_loss(model, loader.batch_of(torch.from_numpy(longest)))
            loss.backward()
            del loss, reserved
            return True
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            return False
        finally:
            model.zero_grad()
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without a GPU

    size, per_update = config.batch_size, config.batch_size * config.gradient_accumulation_steps
    while size and not fits(size):
        size = max((n for n in range(1, size // 2 + 1) if per_update % n == 0), default=0)
    size = int(gather(torch.tensor([size], device=loader.device)).min())
    if size == 0:
        raise TrainingError(
            "out of memory with one sample a batch: try --gradient-checkpointing, or a smaller "
            "model or sample"
        )
    return size


def out_of_memory_advice(
    config: TrainingConfig, resume: str | None, peak: float, data: float = 0.0
) -> str:
    """Return the command that makes the same updates from half the batch.

    In MiB: the `peak`, and the `data` that were placed in the same memory.
    """
    said = f"out of memory at batch {config.batch_size}, with a peak of {peak:,.0f} MiB."
    if data:
        said += f" The data take {data:,.0f} of them, and none with --data-placement workers."
    if config.batch_size == 1:
        return f"{said} Try --gradient-checkpointing, or a smaller model or sample"
    words = [sys.argv[0], *(["--resume", resume] if resume else sys.argv[1:])]
    half, twice = config.batch_size // 2, config.gradient_accumulation_steps * 2
    flags = f"--batch-size {half} --gradient-accumulation-steps {twice}"
    same = "the same updates" if config.batch_size % 2 == 0 else "almost the same updates"
    command = f"accelerate launch {shlex.join(words)} {flags}"
    return f"{said} Take a smaller model, or make {same} from half the batch: {command}"
