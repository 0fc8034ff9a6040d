"""`--auto-batch-size`: chooses the fastest micro-batch that makes the same updates.

Nothing here changes flags, loaders or the Accelerator. `common.lifecycle.trying_loss` puts the
choice into effect.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from accelerate import Accelerator

from common.config import TrainingConfig
from common.console import say
from common.data.loader import Loader
from common.errors import TrainingError
from common.measure import memory
from common.output.tables import print_table
from common.ranks.agreement import gather_from_ranks
from common.system.launch_variables import is_main_rank
from common.training.batch_size.trials import Trial
from common.training.out_of_memory import one_sample_advice, placed_bytes

MIN_SPEEDUP = 1.1  # a larger batch is only taken if it is this many times as fast


class SizeResult(NamedTuple):
    """The result of one micro-batch size over all ranks."""

    size: int
    # "untried" includes a size that some ranks did not try, and which may not fit there.
    outcome: Literal["fits", "does not fit", "untried"]
    rate: float = 0.0  # samples/s of the slowest rank; only if the size fits
    peak_mib: float = 0.0  # of the rank that needed most memory; only if the size was tried


def choose_batch_size(
    try_size: Callable[[int], Trial],
    loaders: Mapping[str, Loader],
    config: TrainingConfig,
    accelerator: Accelerator,
) -> tuple[int, int]:
    """Choose the fastest micro-batch that divides the update and fits into memory on all ranks.

    The requested size stays, unless it does not fit or a larger size is clearly faster. Each rank
    tries sizes on the bare model, without communication, so that no rank waits for one that ran out
    of memory. All sizes that were tried are printed, and so is the choice. The fastest flags of all
    are printed as well, even if they would change the updates.

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
    per_update = requested * config.gradient_accumulation_steps  # samples on this rank
    # A resumed run keeps its size if that still fits.
    largest = requested if config.resume is not None else len(loader.samples)
    sizes = sizes_to_try(requested, per_update, largest)
    trials = try_sizes(sizes, requested, try_size)
    memory.forget_peaks(loader.device)  # the run reports the peaks of its training only
    results = combine_over_ranks(trials, sizes, accelerator)
    show_results(results)
    rates = {result.size: result.rate for result in results if result.outcome == "fits"}
    same_updates = [size for size in rates if per_update % size == 0]
    if not same_updates:
        raise one_sample_error(config, loaders)
    # If the requested size does not fit, begin with the largest size that fits.
    start = requested if requested in rates else same_updates[-1]
    chosen = fastest_size(rates, same_updates, start)
    fastest_of_all = fastest_size(rates, [*rates], chosen)  # it may change the updates
    say_fastest(fastest_of_all, per_update)
    accumulation = per_update // chosen
    if chosen != requested:
        say_change(requested, chosen, accumulation)
    return chosen, accumulation


def one_sample_error(config: TrainingConfig, loaders: Mapping[str, Loader]) -> TrainingError:
    """Return the error for a run in which not even one sample per batch fits into memory."""
    device = loaders["train"].device
    has_placed_data = placed_bytes(device, loaders.values()) > 0
    return TrainingError(
        "out of memory even with one sample per batch",
        advice=one_sample_advice(config, has_placed_data=has_placed_data),
    )


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
    if not trials[requested].fits:
        for size in reversed(sizes[:index]):
            trials[size] = try_size(size)
            if trials[size].fits:
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
) -> list[SizeResult]:
    """Return the result of each size over all ranks; called on all ranks.

    Args:
        trials: the trials of this rank by size, without the sizes that it did not try.
        sizes: all sizes, the same on each rank.
    """
    trials_of_ranks = gather_from_ranks(accelerator, dict(trials))
    return [combine_trials(size, trials_of_ranks) for size in sizes]


def combine_trials(size: int, trials_of_ranks: Sequence[Mapping[int, Trial]]) -> SizeResult:
    """Return the result of one size over all ranks.

    Args:
        trials_of_ranks: the trials of each rank by size. Each rank has tried the requested size,
            and perhaps others, so a size that it did not try is above or below all that it tried.
    """
    # No rank may use a size above those that a rank tried, because it may not fit there. A size
    # below them surely fits there, so the other ranks decide.
    may_not_fit = any(size > max(trials) for trials in trials_of_ranks)
    trials_of_size = [trials[size] for trials in trials_of_ranks if size in trials]
    if may_not_fit or not trials_of_size:
        return SizeResult(size, "untried")
    peak_mib = max(trial.peak_mib for trial in trials_of_size)
    if not all(trial.fits for trial in trials_of_size):
        return SizeResult(size, "does not fit", peak_mib=peak_mib)
    slowest_rate = min(trial.rate for trial in trials_of_size)
    return SizeResult(size, "fits", slowest_rate, peak_mib)


def show_results(results: Iterable[SizeResult]) -> None:
    """Print a table of the sizes that were tried and not ruled out, with the speed if they fit."""
    rows = [["batch", "peak, MiB", "samples/s"]]
    for result in results:
        if result.outcome != "untried":
            speed = f"{result.rate:,.0f}" if result.outcome == "fits" else result.outcome
            rows.append([f"{result.size:,}", f"{result.peak_mib:,.0f}", speed])
    if is_main_rank():
        print_table(rows, title="micro-batches, forward and backward")


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


def say_change(requested: int, chosen: int, accumulation: int) -> None:
    """Print why the run does not use the requested size, and what it uses instead."""
    reason = "does not fit" if chosen < requested else "is slower"
    say(f"batch size {requested} {reason}; the run uses {chosen} × {accumulation} accumulated")


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
