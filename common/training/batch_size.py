"""The micro-batch that is fastest for the same updates, and what to do where memory ran out."""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from rich.table import Table
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from common.agreement import gather_numbers
from common.checkpoints.finished import step_folders
from common.config import TrainingConfig
from common.console import CONSOLE, say
from common.data.loader import Loader, free_memory
from common.devices import empty_cache, is_accelerator
from common.errors import TrainingError, UserError, is_out_of_memory
from common.flags import spelled, stated
from common.machine import is_main_rank
from common.measure import memory
from common.measure.flops import ComputeLoss
from common.measure.stopwatch import synchronize
from common.models.compile import as_written, is_compiled
from common.platforms import command_line

PAYS = 1.1  # times the samples a second is what a larger batch must give
SECONDS = 0.3  # for which a size is timed at least, after a first pass
MARGIN = 0.1  # of a GPU's memory, for what a compiled model takes in place of the one that is tried


class Trial(NamedTuple):
    rate: float  # samples/s; 0: it does not fit
    peak_mib: float
    has_room: bool = False  # for twice as much


def fit_batch_size(
    try_size: Callable[[int], Trial],
    loaders: Mapping[str, Loader],
    config: TrainingConfig,
    accelerator: Accelerator,
) -> tuple[int, int]:
    """Return the fastest micro-batch that all ranks hold, and how many of them make an update.

    It divides the update. It is the one asked for, unless that does not fit, or a larger one pays.
    The Accelerator and the loaders take it at once, and the caller resolves the flags. Each rank
    tries without communication, on the bare model, so that none waits for one that ran out of
    memory. What was tried, and the flags that are fastest of all, are said.
    """
    loader, device = loaders["train"], loaders["train"].device
    asked, per_update = config.batch_size, config.batch_size * config.gradient_accumulation_steps
    # A run that goes on keeps the size that it had, if that fits.
    most = asked if config.resume is not None else len(loader.samples)
    sizes = sizes_to_try(asked, per_update, most)
    tried = search(sizes, asked, try_size)
    memory.forget_peaks(device)
    # Those below what fits may count as fitting; of those above where a rank stopped it knows none.
    below, above = Trial(math.inf, 0), Trial(-1, 0)
    mine = [tried.get(size, below if size < min(tried) else above)[:2] for size in sizes]
    ranks = gather_numbers(accelerator, torch.tensor(mine, dtype=torch.float64))
    rates = dict(zip(sizes, ranks[..., 0].amin(0).tolist(), strict=True))
    fits = {size: rate for size, rate in rates.items() if 0 < rate < math.inf}
    same = [size for size in fits if per_update % size == 0]
    table = Table("batch", "peak, MiB", "samples/s", title="micro-batches, forward and backward")
    for size, peak in zip(sizes, ranks[..., 1].amax(0).tolist(), strict=True):
        if 0 <= rates[size] < math.inf:
            shown = f"{fits[size]:,.0f}" if size in fits else "does not fit"
            table.add_row(f"{size:,}", f"{peak:,.0f}", shown)
    if is_main_rank():
        CONSOLE.print(table)
    if not same:
        advice = "try --gradient-checkpointing, or a smaller model or sample"
        raise TrainingError(f"out of memory with one sample a batch: {advice}")
    chosen = fastest(fits, same, asked if asked in fits else same[-1])
    best = fastest(fits, fits, chosen)
    accumulation = max(1, per_update // best)
    flags = f"--batch-size {best} --gradient-accumulation-steps {accumulation}"
    others = f": other updates, of {best * accumulation} samples in place of {per_update}"
    say(f"fastest {flags}{others if best * accumulation != per_update else ''}")
    accumulation = per_update // chosen
    if chosen != asked:
        why = "does not fit" if chosen < asked else "is slower"
        say(f"batch {asked} {why}: {chosen} × {accumulation} accumulated")
        accelerator.gradient_accumulation_steps = accumulation
        for loader in loaders.values():
            loader.cut_into(chosen, accumulation)
    return chosen, accumulation


class CollectiveFinder(TorchDispatchMode):
    """Notes the first operation that asks other processes for something."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        namespace = operation.namespace
        if self.name is None and namespace in ("c10d", "_c10d_functional"):
            self.name = str(operation).removesuffix(".default")
        return operation(*args, **(kwargs or {}))


def refuse_unfit_loss(
    model: nn.Module, loader: Loader, compute_loss: ComputeLoss, processes: int, couples: bool
) -> None:
    """Raise a `UserError` where sizes can't be tried, or would make other updates.

    Args:
        model: bare, as sizes are tried on it.
        loader: for training.
        compute_loss: the recipe's; called once on all ranks alike, on two samples.
        processes: how many ranks there are.
        couples: whether a sample's loss depends on the other samples of its micro-batch.
    """
    if couples:
        raise UserError(
            "--auto-batch-size would change the updates: this recipe's loss depends on what else "
            "is in a micro-batch (couples_samples=True); leave it out, and pass a --batch-size"
        )
    if processes == 1:
        return
    buffers = [buffer.clone() for buffer in model.buffers()]
    batch = loader.batch_of(torch.arange(min(2, len(loader.samples))))
    model.train()
    with as_written(model), CollectiveFinder() as finder:
        loss, _ = compute_loss(model, batch)
        loss.backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    if finder.name is not None:
        raise UserError(
            f"compute_loss asks other processes ({finder.name}), and --auto-batch-size has each "
            "process try sizes by itself: leave it out, and pass a --batch-size"
        )


def batch_norm_sentence(model: nn.Module, before: int, now: int) -> str | None:
    """Return what a changed micro-batch means for batch norm, or None where there is none."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    if before == now or not any(layer.training for layer in layers):
        return None
    return (
        f"batch norm: its statistics are now those of {now} samples in place of {before}, so that "
        f"updates are not quite the same; pass --batch-size {before} without --auto-batch-size "
        "to keep them"
    )


def sizes_to_try(asked: int, per_update: int, most: int) -> list[int]:
    """Return the halves of a batch that divide the update, the batch, and its doubles to `most`."""
    sizes = [asked]
    while half := max((n for n in range(1, sizes[0] // 2 + 1) if per_update % n == 0), default=0):
        sizes.insert(0, half)
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes


def search(sizes: list[int], asked: int, try_size: Callable[[int], Trial]) -> dict[int, Trial]:
    """Try the size asked for, smaller ones until one fits, or larger ones while that pays."""
    index = sizes.index(asked)
    tried = {asked: try_size(asked)}
    for size in reversed(sizes[:index] if not tried[asked].rate else []):
        tried[size] = try_size(size)
        if tried[size].rate:
            break
    for size, larger in zip(sizes[index:], sizes[index + 1 :], strict=False):
        if not tried[size].has_room:
            break
        tried[larger] = try_size(larger)
        if tried[larger].rate < PAYS * tried[size].rate:
            break
    return tried


def fastest(rates: Mapping[int, float], sizes: Iterable[int], start: int) -> int:
    """Return `start`, or the larger one of `sizes` that pays most."""
    for size in sizes:
        if size > start and rates[size] >= PAYS * rates[start]:
            start = size
    return start


def attempt(
    model: nn.Module, optimizer: Optimizer, loader: Loader, compute_loss: ComputeLoss, size: int
) -> Trial:
    """Time forward and backward passes over the longest samples, as the model is written."""
    device, states = loader.device, 2 if "betas" in optimizer.param_groups[0] else 0
    spare = MARGIN * memory.device_memory(device) * (is_accelerator(device) and is_compiled(model))
    buffers = [buffer.clone() for buffer in model.buffers()]
    lengths = loader.order.lengths
    longest = np.arange(size) if lengths is None else np.argsort(lengths)[-size:].copy()
    seconds, taken = list[float](), memory.MemoryTracker(device)
    model.train()
    try:
        with taken, as_written(model):
            # What the optimizer will make of each weight.
            reserved = [torch.empty_like(p) for p in model.parameters() for _ in range(states)]
            reserved.append(torch.empty(int(spare), dtype=torch.uint8, device=device))
            batch = loader.batch_of(torch.from_numpy(longest))
            while len(seconds) < 2 or sum(seconds[1:]) < SECONDS:
                began = time.perf_counter()
                loss, _ = compute_loss(model, batch)
                loss.backward()
                synchronize(device)
                seconds.append(time.perf_counter() - began)
            del batch, loss, reserved
        rate = size / min(seconds[1:])
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        rate = 0.0
    finally:
        model.zero_grad()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        gc.collect()
        empty_cache(device)
    free = min(free_memory(device), memory.device_memory(device) - memory.memory_now(device))
    return Trial(rate, taken.peak_mib, rate > 0 and 2 * taken.delta_mib * memory.MEBIBYTE < free)


def out_of_memory_advice(
    config: TrainingConfig, directory: Path, device: torch.device, loaders: Iterable[Loader]
) -> str:
    """Return the command that makes the same updates from half the batch, from a checkpoint."""
    peak = memory.peak_memory(memory.memory_used(device))
    said = f"out of memory at batch {config.batch_size}, with a peak of {peak:,.0f} MiB."
    # On a CPU they are mapped from a file, or in its memory anyway.
    if is_accelerator(device) and (placed := sum(loader.placed_bytes for loader in loaders)):
        elsewhere = "none with --data-placement workers"
        said += f" The data take {placed / memory.MEBIBYTE:,.0f} of them, and {elsewhere}."
    if config.batch_size == 1:
        return f"{said} Try --gradient-checkpointing, or {less(config)}"
    goes_on = any(step_folders(directory / "checkpoints"))
    words = [sys.argv[0], *(["--resume", str(directory)] if goes_on else sys.argv[1:])]
    half, twice = config.batch_size // 2, config.gradient_accumulation_steps * 2
    flags = f"--batch-size {half} --gradient-accumulation-steps {twice}"
    same = "the same updates" if config.batch_size % 2 == 0 else "almost the same updates"
    command = f"accelerate launch {command_line(words)} {flags}"
    return f"{said} Either {less(config)}, or make {same} from half the batch: {command}"


def less(config: TrainingConfig) -> str:
    """Return what would take less memory: a lower value of a flag of role "size"."""
    flags = (field.name for field in fields(config))
    found = [spelled(name) for name in flags if stated(type(config), name)["role"] == "size"]
    return f"lower {' or '.join(found)}" if found else "take a smaller model or sample"
