"""Finds out whether the loss of each micro-batch is divided by another number.

A loss that is a mean over class weights, or over the labels that are not ignored, is such a loss:
the sum of the weights, or the number of labels, differs between the micro-batches of an update. So
their mean is not the loss of one batch of the same samples, in which each sample counts as much as
its weight.

The gradients of the model's outputs tell how much a sample counts. They tell it for each loss, also
for one that the recipe computes itself. If a function of torch has computed the loss, it is known
what it has divided by.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.tools.prove.layouts.compared_runs import UPDATES
from common.tools.prove.layouts.pairs import RunPair
from common.tools.prove.records.instrument_records import DivisorType, SampleGradients, TrainingLoss
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.verdicts import Cause

# Relative. Larger differences between the shares of two micro-batches are no rounding.
SHARE_TOLERANCE = 2e-3
# Of samples with gradients below this part of the largest one, rounding hides the share.
SMALLEST_GRADIENT = 1e-3
DIVISOR_IN_WORDS: dict[DivisorType, str] = {
    "weights": "the sum of the weights of its labels",
    "labels": "the number of labels that it does not ignore",
    "elements": "the number of its elements",
}
ADVICE = (
    "divide the sum of the losses by a number that is the same for all micro-batches, such as the "
    "number of samples; or take the mean over the labels of each sample first, as compute_loss in "
    "examples/tagging.py does; or, if you want the mean of each micro-batch, pass "
    "--skip accumulation"
)


@dataclass(frozen=True)
class KnownDivisors:
    """The divisors that a loss function of torch used in the micro-batches of an update."""

    function: str
    divisor_type: DivisorType
    values: tuple[float, ...]  # one for each micro-batch, in order


def cause_of_divisor(pair: RunPair) -> Cause | None:
    """Return the cause that micro-batches divide their losses by different numbers, or None.

    The weights of the two runs agree until the first update in which the divisors differ. So the
    gradients of this update can be compared, and those of later updates can't.

    Args:
        pair: a run of whole batches and one of micro-batches, both on one process.
    """
    for update in range(1, UPDATES + 1):
        shares = shares_of_micro_batches(pair, update)
        if shares is None:
            return cause_without_shares(pair, update)
        if not is_constant(shares):
            return cause_of_shares(pair, update, shares)
    return None


def cause_without_shares(pair: RunPair, first_update: int) -> Cause | None:
    """Return the cause of divisors that differ, from those that torch used, or None.

    Args:
        first_update: the first update in which the samples' gradients do not tell.
    """
    for update in range(first_update, UPDATES + 1):
        known = differing_divisors(pair.variant, update)
        if known is not None:
            return Cause(sentence_about(known, update), ADVICE)
    return None


def cause_of_shares(pair: RunPair, update: int, shares: Sequence[float]) -> Cause | None:
    """Return the cause of shares that differ between the micro-batches of an update, or None.

    Args:
        shares: see `shares_of_micro_batches`.
    """
    if not is_mean_of_each(shares):
        return None
    count = f"{in_words(shares)} times as much as in one batch"
    known = differing_divisors(pair.variant, update)
    if known is not None and explains(known, shares):
        return Cause(f"{sentence_about(known, update)}, so their samples count {count}", ADVICE)
    return Cause(
        f"the samples of the micro-batches of update {update} count {count}: the loss is divided "
        "by a number that differs between micro-batches, such as a sum of weights or a number of "
        "tokens",
        ADVICE,
    )


def sentence_about(known: KnownDivisors, update: int) -> str:
    """Return a sentence that a function of torch divides by numbers that differ."""
    return (
        f"{known.function} divides the loss by {DIVISOR_IN_WORDS[known.divisor_type]}, which is "
        f"{in_words(known.values)} in the micro-batches of update {update}"
    )


def in_words(values: Sequence[float]) -> str:
    """Return numbers as an enumeration."""
    return " and ".join(f"{value:.4g}" for value in values)


def is_constant(values: Sequence[float]) -> bool:
    """Whether positive values are equal within `SHARE_TOLERANCE`."""
    return max(values) <= min(values) * (1 + SHARE_TOLERANCE)


def is_mean_of_each(shares: Sequence[float]) -> bool:
    """Whether shares are those of a mean in each micro-batch.

    A share is the divisor of the whole batch, divided by that of a micro-batch and by the number of
    micro-batches. The divisors of the micro-batches add up to that of the whole batch.
    """
    return math.isclose(fmean(1 / share for share in shares), 1, rel_tol=SHARE_TOLERANCE)


def explains(known: KnownDivisors, shares: Sequence[float]) -> bool:
    """Whether the divisors of a function are the reason for the shares."""
    if len(known.values) != len(shares):
        return False
    return is_constant([value * share for value, share in zip(known.values, shares, strict=True)])


def shares_of_micro_batches(pair: RunPair, update: int) -> list[float] | None:
    """Return how much the samples of each micro-batch of an update count, relative to one batch.

    The result is None if it is unknown, or differs between the samples of a micro-batch.

    Args:
        update: the number of the update, from 1.
    """
    norms_in_one_batch: dict[int, float] = {}
    for norms in sample_gradients(pair.baseline, update):
        norms_in_one_batch |= norms
    smallest = SMALLEST_GRADIENT * max(norms_in_one_batch.values(), default=0.0)
    shares = []
    for norms in sample_gradients(pair.variant, update):
        ratios = [
            norm / norms_in_one_batch[sample]
            for sample, norm in norms.items()
            if norms_in_one_batch.get(sample, 0.0) > smallest
        ]
        if not ratios or min(ratios) <= 0 or not is_constant(ratios):
            return None
        shares.append(fmean(ratios))
    return shares or None


def sample_gradients(run: ObservedRun, update: int) -> Iterator[Mapping[int, float]]:
    """Yield, for each micro-batch of an update, the norm of each sample's gradient.

    Micro-batches whose gradients are unknown are left out.
    """
    for process in run.processes_of_launch(0):
        for record in process.of(SampleGradients):
            micro_batch = process.micro_batches.get((record.step, record.micro_batch))
            if record.step != update - 1 or micro_batch is None:
                continue
            if len(micro_batch.sample_indices) == len(record.gradient_norms):
                yield dict(zip(micro_batch.sample_indices, record.gradient_norms, strict=True))


def differing_divisors(run: ObservedRun, update: int) -> KnownDivisors | None:
    """Return the divisors of the first loss of an update whose divisors differ, or None.

    A micro-batch may compute several losses, which are told apart by the order of the calls.
    """
    for losses in zip(*losses_of_micro_batches(run, update), strict=False):
        divisor_type = losses[0].divisor_type
        if divisor_type is None:
            continue
        divisors = [loss.divisor for loss in losses if loss.divisor_type == divisor_type]
        values = tuple(value for value in divisors if value is not None)
        is_known = len(values) == len(losses) and min(values) > 0
        if is_known and not is_constant(values):
            return KnownDivisors(losses[0].function, divisor_type, values)
    return None


def losses_of_micro_batches(run: ObservedRun, update: int) -> list[list[TrainingLoss]]:
    """Return the losses that functions of torch computed in an update, by micro-batch.

    The list is empty if its micro-batches have different numbers of samples.
    """
    by_micro_batch: defaultdict[tuple[int, int], list[TrainingLoss]] = defaultdict(list)
    sizes = set()
    for process in run.processes_of_launch(0):
        for loss in process.of(TrainingLoss):
            if loss.step == update - 1:
                by_micro_batch[process.rank, loss.micro_batch].append(loss)
                sizes.add(len(process.micro_batches[loss.step, loss.micro_batch].sample_indices))
    return [*by_micro_batch.values()] if len(sizes) == 1 else []
