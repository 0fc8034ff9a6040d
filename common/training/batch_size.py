"""`--auto-batch-size`: chooses the fastest micro-batch that makes the same updates.

Nothing here changes flags, loaders or the Accelerator; the model is left in training mode.
`common.lifecycle.trying_loss` puts the choice into effect.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from common.checkpoints.adapters import bare_optimizer
from common.config import TrainingConfig
from common.console import say
from common.data.loader import Loader, free_memory_bytes
from common.errors import TrainingError, UserError
from common.failures.error_causes import is_out_of_memory
from common.measure import memory
from common.measure.flops import ComputeLoss
from common.measure.memory_plan import mebibytes, optimizer_state_bytes, state_tensors
from common.models.compile import as_written, is_compiled
from common.output.tables import print_table
from common.ranks.agreement import gather_numbers
from common.system.devices import empty_cache, is_accelerator, synchronize_stream
from common.system.launch_variables import is_main_rank
from common.training.evaluation import keep_buffers
from common.training.out_of_memory import one_sample_advice, placed_bytes

MIN_SPEEDUP = 1.1  # a larger batch is only taken if it is this many times as fast
MIN_SECONDS = 0.3  # seconds for which a size is timed, after a first pass
# The share of a GPU's memory that stays free for a compiled model, which may take more memory than
# the uncompiled model with which sizes are tried.
COMPILE_MARGIN = 0.1


class Trial(NamedTuple):
    """The result of trying one micro-batch size on one rank."""

    rate: float  # samples/s; 0 if the size does not fit into memory
    peak_mib: float
    has_room: bool = False  # whether twice the size may fit


# The reports of a rank for sizes that it did not try. For each size, the lowest rate of all ranks
# counts. A size below those that this rank tried surely fits here, so an infinite rate leaves the
# judgement to the ranks that tried the size. A larger size may not fit, so -1 rules it out.
UNTRIED_SMALLER = Trial(math.inf, 0)
UNTRIED_LARGER = Trial(-1, 0)


def was_tried(rate: float) -> bool:
    """Whether a rate is the result of a trial, and not of `UNTRIED_SMALLER` or `UNTRIED_LARGER`."""
    return 0 <= rate < math.inf


def fits(rate: float) -> bool:
    """Whether a size with this rate was tried, and fits into memory on all ranks."""
    return 0 < rate < math.inf


def choose_batch_size(
    try_size: Callable[[int], Trial],
    loaders: Mapping[str, Loader],
    config: TrainingConfig,
    accelerator: Accelerator,
) -> tuple[int, int]:
    """Choose the fastest micro-batch that divides the update and fits into memory on all ranks.

    The requested size stays, unless it does not fit or a larger size is clearly faster. Each rank
    tries sizes on the bare model, without communication, so that no rank waits for one that ran out
    of memory. All sizes that were tried are printed, and so is the choice. The fastest flags are
    printed even if they change the updates.

    Args:
        try_size: a function that tries a micro-batch size on this rank.
        loaders: the run's loaders, by split.
        config: the flags.
        accelerator: the run's Accelerator.

    Returns:
        The size, and how many such micro-batches make an update.

    Raises:
        TrainingError: not even one sample fits.
    """
    loader = loaders["train"]
    requested = config.batch_size
    per_update = requested * config.gradient_accumulation_steps
    # A resumed run keeps its size if that still fits.
    largest = requested if config.resume is not None else len(loader.samples)
    sizes = sizes_to_try(requested, per_update, largest)
    trials = try_sizes(sizes, requested, try_size)
    memory.forget_peaks(loader.device)  # the run reports the peaks of its training only
    rates, peaks = combine_over_ranks(trials, sizes, accelerator)
    show_trials(rates, peaks)
    chosen = choose_by_rates(rates, config, loaders)
    accumulation = per_update // chosen
    if chosen != requested:
        reason = "does not fit" if chosen < requested else "is slower"
        say(f"batch size {requested} {reason}; the run uses {chosen} × {accumulation} accumulated")
    return chosen, accumulation


def sizes_to_try(requested: int, per_update: int, largest: int) -> list[int]:
    """Return the micro-batch sizes to try, in ascending order.

    - Below the requested size are divisors of `per_update`, so that the updates stay the same. Each
      divisor is at most half of the next.
    - Above the requested size are its doublings up to `largest`. Some may change the updates. The
      user is told if such a size is the fastest, but it is not chosen.

    Args:
        requested: the size that the flags state.
        per_update: the samples of an update on this rank.
        largest: the largest size to try, unless the requested size is larger.
    """
    sizes = [requested]
    while sizes[0] > 1:
        half = sizes[0] // 2
        next_smaller = max(n for n in range(1, half + 1) if per_update % n == 0)
        sizes.insert(0, next_smaller)
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes


def try_sizes(
    sizes: list[int], requested: int, try_size: Callable[[int], Trial]
) -> dict[int, Trial]:
    """Try the requested size; then smaller sizes until one fits, or larger ones while that pays.

    Larger sizes pay while the last size left room in memory and was clearly faster than the size
    before it.

    Returns:
        The trials by size, without the sizes that were not tried.
    """
    index = sizes.index(requested)
    trials = {requested: try_size(requested)}
    if not trials[requested].rate:
        for size in reversed(sizes[:index]):
            trials[size] = try_size(size)
            if trials[size].rate:
                break
    # A requested size that does not fit has no room either, so no larger size is tried.
    for size, larger in pairwise(sizes[index:]):
        if not trials[size].has_room:
            break
        trials[larger] = try_size(larger)
        if trials[larger].rate < MIN_SPEEDUP * trials[size].rate:
            break
    return trials


def combine_over_ranks(
    trials: Mapping[int, Trial], sizes: list[int], accelerator: Accelerator
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the lowest rate (samples/s) and the highest peak (MiB) of all ranks, by size.

    For a size that a rank did not try, `UNTRIED_SMALLER` or `UNTRIED_LARGER` counts.
    """
    own_trials: list[tuple[float, float]] = []
    for size in sizes:
        untried = UNTRIED_SMALLER if size < min(trials) else UNTRIED_LARGER
        trial = trials.get(size, untried)
        own_trials.append((trial.rate, trial.peak_mib))
    own_numbers = torch.tensor(own_trials, dtype=torch.float64)
    numbers = gather_numbers(accelerator, own_numbers)  # [ranks, sizes, 2]: rate, then peak
    rates = numbers[..., 0].amin(0).tolist()
    peaks = numbers[..., 1].amax(0).tolist()
    return dict(zip(sizes, rates, strict=True)), dict(zip(sizes, peaks, strict=True))


def show_trials(rates: Mapping[int, float], peaks: Mapping[int, float]) -> None:
    """Print a table of the sizes that were tried, with their speed if they fit into memory."""
    rows = [["batch", "peak, MiB", "samples/s"]]
    for size, rate in rates.items():
        if was_tried(rate):
            speed = f"{rate:,.0f}" if fits(rate) else "does not fit"
            rows.append([f"{size:,}", f"{peaks[size]:,.0f}", speed])
    if is_main_rank():
        print_table(rows, title="micro-batches, forward and backward")


def choose_by_rates(
    rates: Mapping[int, float], config: TrainingConfig, loaders: Mapping[str, Loader]
) -> int:
    """Return the fastest size that keeps the updates; print the flags of the fastest size of all.

    Args:
        rates: samples/s by size, the lowest of all ranks. A rate is 0 if the size does not fit, -1
            if a rank did not try this large size, and infinite if no rank tried this small size.
        config: the flags.
        loaders: the run's loaders, by split.

    Raises:
        TrainingError: not even one sample fits.
    """
    requested = config.batch_size
    per_update = requested * config.gradient_accumulation_steps  # samples on this rank
    fitting = {size: rate for size, rate in rates.items() if fits(rate)}
    same_updates = [size for size in fitting if per_update % size == 0]
    if not same_updates:
        data_bytes = placed_bytes(loaders["train"].device, loaders.values())
        raise TrainingError(
            "out of memory even with one sample per batch",
            advice=one_sample_advice(config, has_placed_data=data_bytes > 0),
        )
    # If the requested size does not fit, begin with the largest size that fits.
    start = requested if requested in fitting else same_updates[-1]
    chosen = fastest_size(fitting, same_updates, start)
    fastest_of_all = fastest_size(fitting, [*fitting], chosen)  # it may change the updates
    say_fastest(fastest_of_all, per_update)
    return chosen


def fastest_size(rates: Mapping[int, float], sizes: Iterable[int], start: int) -> int:
    """Return the size to use: `start`, unless a larger size of `sizes` is clearly faster.

    Args:
        rates: samples/s by size.
        sizes: the candidates, in ascending order.
        start: the size to use if no larger size is clearly faster.
    """
    best = start
    for size in sizes:
        if size > best and rates[size] >= MIN_SPEEDUP * rates[best]:
            best = size
    return best


def say_fastest(size: int, per_update: int) -> None:
    """Print the flags that are fastest, and whether they change the samples of an update.

    Args:
        size: the fastest micro-batch.
        per_update: the samples of an update on this rank, by the current flags.
    """
    accumulation = max(1, per_update // size)
    samples = size * accumulation
    change = ""
    if samples != per_update:
        change = f" (updates would then have {samples} samples instead of {per_update})"
    say(f"fastest --batch-size {size} --gradient-accumulation-steps {accumulation}{change}")


def time_size(
    model: nn.Module, optimizer: Optimizer, loader: Loader, compute_loss: ComputeLoss, size: int
) -> Trial:
    """Time forward and backward passes of one size on this rank, and measure their memory.

    The passes run without torch.compile, on the longest samples, because these need most memory.
    Afterwards the model has its earlier buffers, and no gradients. If the size does not fit into
    memory, the trial's rate is 0.

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
        spare_bytes = COMPILE_MARGIN * memory.device_memory(device)
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
    free_within_limit = memory.device_memory(device) - memory.memory_now(device)
    free_bytes = min(free_memory_bytes(device), free_within_limit)
    # Twice the size may take twice the memory.
    needed_bytes = 2 * tracker.delta_mib * memory.MEBIBYTE
    return Trial(rate, tracker.peak_mib, has_room=rate > 0 and needed_bytes < free_bytes)


def bytes_of_future_state(optimizer: Optimizer) -> int:
    """Return the bytes that the first update will allocate for state; 0 if that is unknown."""
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


def refuse_unfit_loss(
    model: nn.Module, loader: Loader, compute_loss: ComputeLoss, processes: int, couples: bool
) -> None:
    """Raise a `UserError` if sizes can't be tried, or if another size would change the updates.

    Each rank tries sizes without the others, so the loss must not communicate.

    Args:
        model: the bare model, without DDP.
        loader: the training loader.
        compute_loss: the recipe's function; it is called once on each rank, on two samples.
        processes: how many ranks there are.
        couples: whether a sample's loss depends on the other samples of its micro-batch.
    """
    if couples:
        raise UserError(
            "--auto-batch-size would change the updates, because this recipe's loss depends on the "
            "other samples of a micro-batch (couples_samples=True)",
            advice="pass --no-auto-batch-size, and --batch-size N",
        )
    if processes == 1:
        return
    collective = collective_in_loss(model, loader, compute_loss)
    if collective is not None:
        raise UserError(
            (
                "--auto-batch-size can't be used, because compute_loss communicates with other "
                f"processes ({collective}), while each process tries sizes on its own"
            ),
            advice=(
                "pass --no-auto-batch-size, and --batch-size N; a run that was started with "
                "--auto-batch-size keeps this flag, so resume it in one process"
            ),
        )


def collective_in_loss(model: nn.Module, loader: Loader, compute_loss: ComputeLoss) -> str | None:
    """Return the first operation of the loss that communicates with other processes, if any.

    The loss is computed on two samples. The model keeps its buffers, and has no gradients.
    """
    # The call below changes buffers, such as batch norm's statistics.
    restore_buffers = keep_buffers(model)
    batch = loader.batch_of(torch.arange(min(2, len(loader.samples))))
    model.train()
    with as_written(model), CollectiveFinder() as finder:
        loss, _ = compute_loss(model, batch)
        loss.backward()
    model.zero_grad()
    restore_buffers()
    return finder.first_collective


class CollectiveFinder(TorchDispatchMode):
    """Records the name of the first operation that communicates with other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first_collective: str | None = None

    def __torch_dispatch__(
        self,
        operation: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation, and note its name if it is the first that communicates.

        Torch calls this method for each torch operation within the `with` block.
        """
        namespace = operation.namespace
        if self.first_collective is None and namespace in ("c10d", "_c10d_functional"):
            self.first_collective = str(operation).removesuffix(".default")
        return operation(*args, **(kwargs or {}))


def batch_norm_sentence(model: nn.Module, before: int, now: int) -> str | None:
    """Return the sentence to print if a changed micro-batch changes batch norm, else None.

    Args:
        model: the model, of which only layers in training mode count.
        before: the requested samples per micro-batch.
        now: the chosen samples per micro-batch.
    """
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    if before == now or not any(layer.training for layer in layers):
        return None
    return (
        f"batch norm: its statistics are now those of {now} samples instead of {before}, so "
        f"updates change slightly; to keep them, start a new run with --batch-size {before} and "
        "without --auto-batch-size"
    )
