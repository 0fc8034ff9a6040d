"""Computes the metrics that the loop records again, from what torch's loss functions saw.

A loop may compute several losses of a micro-batch. A metric is right if one of them gives it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from common.tools.prove.bench import Cause
from common.tools.prove.counts import FigureCount
from common.tools.prove.notes import TrainingLoss
from common.tools.prove.observation import ObservedLaunch, ObservedRun, Recorded

SHARES = 1e-4  # relative tolerance of shares of samples
# The loop may compute distances in the precision of the model, such as bf16.
DISTANCES = 1e-2
TOLERANCES = {"accuracy": SHARES, "error": SHARES, "mse": DISTANCES, "mae": DISTANCES}
OTHER_NAMES = {"error_rate": "error"}
SMALL = 1e-6  # an absolute difference that is always allowed
ADVICE = (
    "pass run.record the metric's values for the samples of the micro-batch, computed from the "
    "same outputs and labels as the loss"
)


def wrong_metrics(run: ObservedRun, count: FigureCount) -> Iterator[Cause]:
    """Yield a cause for each metric that the outputs of its micro-batch do not give."""
    told: set[str] = set()
    for launch in run.launches:
        losses = losses_by_place(launch)
        for record in launch.of(Recorded):
            computed = losses.get((record.step, record.micro_batch), [])
            for name, (total, elements) in record.metrics.items():
                value = total / elements if elements else math.nan
                expected = means_named(name, computed)
                answer = is_right(name, value, expected)
                count.unknown += answer is None
                count.compared += answer is not None
                if answer is False and name not in told:
                    told.add(name)
                    yield Cause(
                        f"the loop recorded {name} {value:.6g} in update {record.step + 1}, and "
                        f"the outputs of this micro-batch give {expected[0]:.6g}",
                        ADVICE,
                    )


def losses_by_place(launch: ObservedLaunch) -> dict[tuple[int, int], list[TrainingLoss]]:
    """Return the losses that were computed, by update and number of the micro-batch in it."""
    losses: defaultdict[tuple[int, int], list[TrainingLoss]] = defaultdict(list)
    for note in launch.of(TrainingLoss):
        losses[note.step, note.micro_batch].append(note)
    return losses


def means_named(name: str, losses: Sequence[TrainingLoss]) -> list[float]:
    """Return what each computed loss gives for a metric, if it gives that."""
    known_name = OTHER_NAMES.get(name, name)
    return [loss.means[known_name] for loss in losses if known_name in loss.means]


def is_right(name: str, value: float, expected: Sequence[float]) -> bool | None:
    """Whether a metric is one of the values that its outputs give; None if nobody knows.

    Args:
        expected: a value for each loss of the micro-batch that gives the metric. A loop with
            several losses may mean outputs of another kind by the metric.
    """
    tolerance = TOLERANCES.get(OTHER_NAMES.get(name, name))
    if tolerance is None or not expected or not math.isfinite(value):
        return None
    if any(math.isclose(value, each, rel_tol=tolerance, abs_tol=SMALL) for each in expected):
        return True
    return False if len(expected) == 1 else None
