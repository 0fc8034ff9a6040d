"""Tries one micro-batch size on one rank, for `--auto-batch-size`: its speed and its memory."""

import gc
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoints.adapters import bare_optimizer
from common.data.loader import Loader, free_memory_bytes
from common.failures.error_causes import is_out_of_memory
from common.measure import memory, memory_limits
from common.measure.flops import ComputeLoss
from common.measure.memory_plan import mebibytes, optimizer_state_bytes, state_tensors
from common.models.compile import as_written, is_compiled
from common.system.devices import empty_cache, is_accelerator, synchronize_stream
from common.training.evaluation.mode import keep_buffers

MIN_SECONDS = 0.3  # seconds for which a size is timed, after a first pass
# The share of a GPU's memory that stays free for a compiled model, which may take more memory than
# the uncompiled model with which sizes are tried.
COMPILE_MARGIN = 0.1


class Trial(NamedTuple):
    """The result of trying one micro-batch size on one rank."""

    rate: float  # samples/s; 0 if the size does not fit into memory
    peak_mib: float
    has_room: bool = False  # whether twice the size may fit

    @property
    def fits(self) -> bool:
        """Whether the size fits into the memory of this rank."""
        return self.rate > 0


def time_size(
    model: nn.Module, optimizer: Optimizer, loader: Loader, compute_loss: ComputeLoss, size: int
) -> Trial:
    """Time forward and backward passes of one size on this rank, and measure their memory.

    The passes run without torch.compile, on the longest samples, because these need most memory.
    Afterwards the model is in training mode, with its earlier buffers and no gradients. If the size
    does not fit into memory, the trial's rate is 0.

    Args:
        model: the bare model.
        optimizer: the optimizer, for whose state memory is set aside.
        loader: the training loader.
        compute_loss: the recipe's function.
        size: the samples of the micro-batch.
    """
    device = loader.device
    spare_bytes = 0.0
    if is_accelerator(device) and is_compiled(model):
        spare_bytes = COMPILE_MARGIN * memory_limits.device_memory(device)
    restore_buffers = keep_buffers(model)
    tracker = memory.MemoryTracker(device)
    model.train()
    try:
        with tracker, as_written(model):
            # This memory is held while the passes run, because training will take it, too.
            reserved_bytes = bytes_of_future_state(optimizer) + int(spare_bytes)
            reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
            seconds = time_passes(model, loader, compute_loss, size)
            del reserved
        rate = size / min(seconds[1:])  # the first pass also warms up
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        rate = 0.0
    finally:
        model.zero_grad()
        restore_buffers()
        gc.collect()
        empty_cache(device)
    # A container may have a limit of its own.
    free_within_limit = memory_limits.device_memory(device) - memory.memory_now(device)
    free_bytes = min(free_memory_bytes(device), free_within_limit)
    # Twice the size may take twice the memory.
    needed_bytes = 2 * tracker.delta_mib * memory.MEBIBYTE
    return Trial(rate, tracker.peak_mib, has_room=rate > 0 and needed_bytes < free_bytes)


def bytes_of_future_state(optimizer: Optimizer) -> int:
    """Return the bytes that the first update will allocate for state; 0 if that is unknown.

    A trial makes no update, so it would not take this memory by itself.
    """
    bare = bare_optimizer(optimizer)
    whole_state = optimizer_state_bytes(bare)
    if whole_state is None:
        return 0
    current_state = int(mebibytes(state_tensors(bare)) * memory.MEBIBYTE)
    return max(0, whole_state - current_state)


def time_passes(
    model: nn.Module, loader: Loader, compute_loss: ComputeLoss, size: int
) -> list[float]:
    """Return the seconds of each forward and backward pass on the longest samples.

    The first pass also warms up. The others take `MIN_SECONDS` in all; there is at least one.
    """
    lengths = loader.order.lengths
    longest = np.arange(size) if lengths is None else np.argsort(lengths)[-size:].copy()
    batch = loader.batch_of(torch.from_numpy(longest))
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds[1:]) < MIN_SECONDS:
        start = time.perf_counter()
        loss, _ = compute_loss(model, batch)
        loss.backward()
        synchronize_stream(loader.device)
        seconds.append(time.perf_counter() - start)
    return seconds
