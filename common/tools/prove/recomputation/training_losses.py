"""Compares recorded losses with those that torch computes, in two divisions of an update.

A recipe may record any multiple of a computed loss, such as half of a squared error. But the
multiple must not depend on how an update is divided among micro-batches and processes.

In this module, a multiple is the ratio of a recorded loss to a computed one: 0.5 in this example.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from common.metric_names import TRAINING_LOSS
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

# The key of a micro-batch: the number of updates before it, and its number within its update.
MicroBatchKey = tuple[int, int]


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
        return CheckedFigures(
            "recorded losses", compared_count=losses, compared_names=frozenset({TRAINING_LOSS})
        )
    mistake = mistaken_factor(ratios, run)
    if mistake is None:
        return CheckedFigures("recorded losses", unknown_names=frozenset({TRAINING_LOSS}))
    cause = Cause(
        f"the recorded losses are {mistake.factor:.3g} times those that were computed, which is "
        f"{mistake.phrase}",
        ADVICE_OF_LOSS,
    )
    return CheckedFigures(
        "recorded losses",
        causes=(cause,),
        compared_count=losses,
        compared_names=frozenset({TRAINING_LOSS}),
    )


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


class MistakenFactor(NamedTuple):
    """A factor by which a recipe may multiply a loss by mistake."""

    factor: float
    phrase: str  # such as "1 / the number of processes"


def mistaken_factor(ratios: Sequence[float], run: ObservedRun) -> MistakenFactor | None:
    """Return the first factor of a mistake that explains a ratio; None if none does.

    Args:
        ratios: the ratios of multiples; see `ratios_of_multiples`.
        run: the run with several micro-batches or processes.
    """
    for ratio in ratios:
        for mistake in mistaken_factors(run):
            if is_near_factor(ratio, mistake.factor):
                return mistake
    return None


def multiples_of_losses(run: ObservedRun) -> list[float | None]:
    """Return the ratio of the recorded losses to each computed loss, and to their sum.

    The entries are in the order of `computed_losses`. An entry is None if the ratio varies from
    micro-batch to micro-batch, or is unknown for a recorded one.
    """
    recorded = recorded_losses(run)
    return [constant_ratio(recorded, computed) for computed in computed_losses(run)]


def constant_ratio(
    recorded: Mapping[MicroBatchKey, float], computed: Mapping[MicroBatchKey, float]
) -> float | None:
    """Return the ratio of recorded losses to computed ones; None if it varies or is unknown."""
    ratios = []
    for key, loss in computed.items():
        if key in recorded and abs(loss) > SMALLEST_LOSS:
            ratios.append(recorded[key] / loss)
    is_known = bool(ratios) and len(ratios) == len(recorded)
    if is_known and all(is_near_factor(ratio, ratios[0]) for ratio in ratios):
        return ratios[0]
    return None


def mistaken_factors(run: ObservedRun) -> Iterator[MistakenFactor]:
    """Yield the factors by which a recipe may multiply a loss by mistake."""
    counts = {
        "the number of processes": run.world_size,
        "the number of micro-batches of an update": run.start_record.accumulation,
    }
    for name, count in counts.items():
        if count > 1:
            yield MistakenFactor(float(count), name)
            yield MistakenFactor(1 / count, f"1 / {name}")


def is_near_factor(ratio: float, factor: float) -> bool:
    """Whether a ratio equals a factor, within the tolerance."""
    return math.isclose(ratio, factor, rel_tol=FACTOR_TOLERANCE)


def recorded_losses(run: ObservedRun) -> dict[MicroBatchKey, float]:
    """Return the losses that the loop recorded, as means over ranks, by micro-batch."""
    losses: defaultdict[MicroBatchKey, list[float]] = defaultdict(list)
    for _, record in run.all(RecordedMicroBatch):
        losses[record.step, record.micro_batch].append(record.loss)
    return {key: fmean(losses_of_ranks) for key, losses_of_ranks in losses.items()}


def computed_losses(run: ObservedRun) -> list[dict[MicroBatchKey, float]]:
    """Return the losses that functions of torch computed, as means over ranks, by micro-batch.

    A micro-batch may compute several losses. Each has an entry in the order of the calls, and the
    last entry has their sum. An entry other than the sum lacks the micro-batches in which a rank
    has no such call.
    """
    losses_by_call = losses_of_calls(run)
    sums: defaultdict[MicroBatchKey, list[float]] = defaultdict(list)
    means_by_call = []
    for losses in losses_by_call:
        means = {}
        for key, losses_of_ranks in losses.items():
            mean = fmean(losses_of_ranks)
            sums[key].append(mean)
            if len(losses_of_ranks) == run.world_size:
                means[key] = mean
        means_by_call.append(means)
    return [*means_by_call, {key: math.fsum(means) for key, means in sums.items()}]


def losses_of_calls(run: ObservedRun) -> list[dict[MicroBatchKey, list[float]]]:
    """Return the losses of all ranks by micro-batch, for each call of a loss function within it.

    The first entry has the first call of each micro-batch, and so on.
    """
    losses_by_call: list[dict[MicroBatchKey, list[float]]] = []
    for process in run.processes:
        call_counts: Counter[MicroBatchKey] = Counter()
        for record in process.of(TrainingLoss):
            key = (record.step, record.micro_batch)
            call = call_counts[key]
            call_counts[key] += 1
            if call == len(losses_by_call):
                losses_by_call.append({})
            losses_by_call[call].setdefault(key, []).append(record.loss)
    return losses_by_call
