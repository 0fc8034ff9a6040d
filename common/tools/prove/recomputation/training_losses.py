"""Compares recorded losses with those that torch computes, in two divisions of an update.

A recipe may record any multiple of a computed loss, such as half of a squared error. But the
multiple must not depend on how an update is divided among micro-batches and processes.

In this module, a multiple is the ratio of a recorded loss to a computed one: 0.5 in this example.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from common.tools.prove.recomputation.checked_figures import CheckedFigures
from common.tools.prove.records.instrument_records import TrainingLoss
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import RecordedMicroBatch
from common.tools.prove.verdicts import Cause

FACTOR_TOLERANCE = 1e-3  # relative, of a factor between two losses
SMALLEST_LOSS = 1e-6  # smaller losses do not count
ADVICE_OF_LOSS = (
    "pass run.record the mean loss of the process's own micro-batch; the run averages it over "
    "micro-batches and processes"
)

Position = tuple[int, int]  # of a micro-batch: the updates before it, its number in the update


def checked_losses(whole: ObservedRun, run: ObservedRun) -> CheckedFigures:
    """Check whether recorded losses depend on how an update is divided.

    A recipe may record any multiple of the loss that a function of torch computes, such as half of
    a squared error. It may also add terms. But the multiple must not depend on whether an update is
    one batch of one process or is divided.

    Args:
        whole: a run with one micro-batch in each update, on one process.
        run: a run with several micro-batches or processes.
    """
    losses = len(recorded_losses(run))
    ratios = ratios_of_multiples(whole, run)
    # The recipe records one of its losses or their sum; which one is unknown. So one of them with
    # the same multiple in both runs is enough.
    if any(is_near_factor(ratio, 1.0) for ratio in ratios):
        return CheckedFigures("recorded losses", compared_count=losses)
    mistake = mistaken_factor(ratios, run)
    if mistake is None:
        return CheckedFigures("recorded losses", unknown_count=losses)
    factor, phrase = mistake
    cause = Cause(
        f"the recorded losses are {factor:.3g} times those that were computed, which is {phrase}",
        ADVICE_OF_LOSS,
    )
    return CheckedFigures("recorded losses", (cause,), compared_count=losses)


def ratios_of_multiples(whole: ObservedRun, run: ObservedRun) -> list[float]:
    """Return the ratios of the multiples of `run` to those of `whole`, where both are known.

    A ratio of 1 means that the recorded loss does not depend on the division of an update.
    """
    # The runs may compute different numbers of losses. Those without a counterpart are left out.
    pairs = zip(multiples_of_losses(whole), multiples_of_losses(run), strict=False)
    return [
        multiple / multiple_of_whole
        for multiple_of_whole, multiple in pairs
        if multiple_of_whole and multiple
    ]


def mistaken_factor(ratios: Sequence[float], run: ObservedRun) -> tuple[float, str] | None:
    """Return the first factor of a mistake that explains a ratio, with its name; None if none does.

    Args:
        ratios: the ratios of multiples; see `ratios_of_multiples`.
        run: the run with several micro-batches or processes.
    """
    for ratio in ratios:
        for factor, phrase in factors_of_mistakes(run):
            if is_near_factor(ratio, factor):
                return factor, phrase
    return None


def multiples_of_losses(run: ObservedRun) -> list[float | None]:
    """Return the ratio of the recorded losses to each computed loss, and to their sum.

    The entries are in the order of `computed_losses`. An entry is None if the ratio varies from
    micro-batch to micro-batch, or is unknown for a recorded one.
    """
    recorded = recorded_losses(run)
    multiples: list[float | None] = []
    for losses in computed_losses(run):
        ratios = []
        for position, value in losses.items():
            if position in recorded and abs(value) > SMALLEST_LOSS:
                ratios.append(recorded[position] / value)
        is_known = bool(ratios) and len(ratios) == len(recorded)
        if is_known and all(is_near_factor(ratio, ratios[0]) for ratio in ratios):
            multiples.append(ratios[0])
        else:
            multiples.append(None)
    return multiples


def factors_of_mistakes(run: ObservedRun) -> Iterator[tuple[float, str]]:
    """Yield the factors by which a recipe may multiply a loss by mistake, with their names."""
    counts = {
        "the number of processes": run.world_size,
        "the number of micro-batches of an update": run.start_record.accumulation,
    }
    for name, count in counts.items():
        if count > 1:
            yield float(count), name
            yield 1 / count, f"1 / {name}"


def is_near_factor(ratio: float, factor: float) -> bool:
    """Whether a ratio equals a factor, within the tolerance."""
    return math.isclose(ratio, factor, rel_tol=FACTOR_TOLERANCE)


def recorded_losses(run: ObservedRun) -> dict[Position, float]:
    """Return the losses that the loop recorded, as means over ranks, by micro-batch."""
    losses: defaultdict[Position, list[float]] = defaultdict(list)
    for _, record in run.all(RecordedMicroBatch):
        losses[record.step, record.micro_batch].append(record.loss)
    return {position: fmean(values) for position, values in losses.items()}


def computed_losses(run: ObservedRun) -> list[dict[Position, float]]:
    """Return the losses that functions of torch computed, as means over ranks, by micro-batch.

    A micro-batch may compute several losses. Each has an entry in the order of the calls, and the
    last entry has their sum.
    """
    values = losses_of_ranks(run)  # by micro-batch, and then by call
    most_calls = max((len(by_call) for by_call in values.values()), default=0)
    losses = []
    for call in range(most_calls):
        means = {}
        for position, by_call in values.items():
            if len(by_call.get(call, ())) == run.world_size:
                means[position] = fmean(by_call[call])
        losses.append(means)
    sums = {}
    for position, by_call in values.items():
        sums[position] = math.fsum(fmean(losses_of_call) for losses_of_call in by_call.values())
    return [*losses, sums]


def losses_of_ranks(run: ObservedRun) -> dict[Position, dict[int, list[float]]]:
    """Return the losses of all ranks, by micro-batch and by the number of the call within it."""
    values: defaultdict[Position, defaultdict[int, list[float]]]
    values = defaultdict(lambda: defaultdict(list))
    for process in run.processes:
        calls: defaultdict[Position, int] = defaultdict(int)
        for loss in process.of(TrainingLoss):
            position = loss.step, loss.micro_batch
            values[position][calls[position]].append(loss.loss)
            calls[position] += 1
    return {position: dict(by_call) for position, by_call in values.items()}
