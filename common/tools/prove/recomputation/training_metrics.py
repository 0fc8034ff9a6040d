"""Computes recorded training metrics again, from the inputs of torch's loss functions.

A loop may compute several losses of a micro-batch. A metric is correct if it follows from one of
them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from common.tools.prove.recomputation.checked_figures import CheckedFigures
from common.tools.prove.recomputation.figure_functions import known_name
from common.tools.prove.records.instrument_records import TrainingLoss
from common.tools.prove.records.observed_run import ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import RecordedMicroBatch
from common.tools.prove.verdicts import Cause

SHARE_TOLERANCE = 1e-4  # relative, for shares of samples
# Relative. The loop may compute distances in the precision of the model, such as bf16.
DISTANCE_TOLERANCE = 1e-2
TOLERANCES = {
    "accuracy": SHARE_TOLERANCE,
    "error": SHARE_TOLERANCE,
    "mse": DISTANCE_TOLERANCE,
    "mae": DISTANCE_TOLERANCE,
}
ABSOLUTE_TOLERANCE = 1e-6  # this difference is always allowed
ADVICE = (
    "pass run.record the metric's values for the samples of the micro-batch, computed from the "
    "same outputs and labels as the loss"
)


def checked_metrics(run: ObservedRun) -> CheckedFigures:
    """Check whether each recorded metric follows from the outputs of its micro-batch.

    The outputs are those that one of torch's loss functions got, with their labels. Each name of a
    metric has one cause at most: the first wrong value.
    """
    causes: dict[str, Cause] = {}  # by the name of the metric
    compared_count = 0
    compared_names: set[str] = set()
    unknown_names: set[str] = set()
    for process in run.processes:
        losses = losses_by_micro_batch(process)
        for record in process.of(RecordedMicroBatch):
            computed = losses.get((record.step, record.micro_batch), [])
            for name, (total, elements) in record.metrics.items():
                value = total / elements if elements else math.nan
                expected = expected_values(name, computed)
                is_correct = follows_from_outputs(name, value, expected)
                if is_correct is None:
                    unknown_names.add(f"train/{name}")
                    continue
                compared_count += 1
                compared_names.add(f"train/{name}")
                if not is_correct and name not in causes:
                    causes[name] = Cause(
                        f"the loop recorded {name} {value:.6g} in update {record.step + 1}, and "
                        f"the outputs of this micro-batch give {expected[0]:.6g}",
                        ADVICE,
                    )
    return CheckedFigures(
        "recorded metrics",
        causes=(*causes.values(),),
        compared_count=compared_count,
        compared_names=frozenset(compared_names),
        unknown_names=frozenset(unknown_names),
    )


def losses_by_micro_batch(process: ObservedProcess) -> dict[tuple[int, int], list[TrainingLoss]]:
    """Return the computed losses, by the update and by the number of the micro-batch in it."""
    losses: defaultdict[tuple[int, int], list[TrainingLoss]] = defaultdict(list)
    for loss in process.of(TrainingLoss):
        losses[loss.step, loss.micro_batch].append(loss)
    return losses


def expected_values(name: str, losses: Sequence[TrainingLoss]) -> list[float]:
    """Return the value of a metric from each computed loss that gives one."""
    metric = known_name(name)
    return [loss.metrics[metric] for loss in losses if metric in loss.metrics]


def follows_from_outputs(name: str, value: float, expected: Sequence[float]) -> bool | None:
    """Whether a metric follows from the outputs of its micro-batch; None if this is unknown.

    Args:
        expected: a value for each loss of the micro-batch that gives the metric. If there are
            several and none of them agrees, the metric may belong to other outputs.
    """
    tolerance = TOLERANCES.get(known_name(name))
    if tolerance is None or not expected or not math.isfinite(value):
        return None
    if any(
        math.isclose(value, candidate, rel_tol=tolerance, abs_tol=ABSOLUTE_TOLERANCE)
        for candidate in expected
    ):
        return True
    return False if len(expected) == 1 else None
