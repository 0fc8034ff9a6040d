"""Checks the figures that a recipe's evaluation returned."""

from collections.abc import Mapping
from itertools import chain

from accelerate import Accelerator

from common.errors import UserError
from common.measure.sums import Evaluation, of_all_ranks
from common.measure.value_checks import Metrics
from common.objective import Objective
from common.ranks.agreement import gather_from_ranks


def checked_figures(figures: Metrics, objective: Objective, accelerator: Accelerator) -> Evaluation:
    """Return an evaluation's figures over all ranks; called on all ranks.

    Raises:
        UserError: `figures` is not a dict of figures by name, or lacks the objective.
    """
    if not isinstance(figures, Mapping):
        raise UserError(
            f"the figures of an evaluation are of type {type(figures).__name__} instead of a "
            "dictionary",
            advice="pass a dictionary of metrics, such as sums.result()",
        )
    values = of_all_ranks(accelerator, figures)
    if objective.metric not in values:
        raise missing_objective_error(objective, [*values])
    return values


def missing_objective_error(objective: Objective, names: list[str]) -> UserError:
    """Return the error for an evaluation that lacks the metric of the objective.

    Args:
        names: the names of the metrics that the evaluation returned.
    """
    returned = f"only {', '.join(names)}" if names else "no metrics"
    remedy = f"return {objective.metric!r} from the evaluation"
    if names:
        example = "loss:min" if "loss" in names else f"{names[0]}:max"
        remedy += (
            ", or set OBJECTIVE to one of these names with :max or :min, as in "
            f'OBJECTIVE = "{example}"'
        )
    return UserError(
        f"the objective is {objective}, but the evaluation returned {returned}", advice=remedy
    )


def refuse_means(figures: Metrics, accelerator: Accelerator) -> None:
    """Raise a `UserError` if an evaluation passed a mean to `sums.add`; called on all ranks.

    `sums.add` takes totals over a batch. With a mean instead, the logged figure would be too
    small. All ranks raise the error, even if only one of them saw such a mean.

    Args:
        figures: those of the rehearsal, whose second batch repeats the first; see `evident_means`.
    """
    own_means = figures.evident_means() if isinstance(figures, Evaluation) else []
    means_of_ranks = gather_from_ranks(accelerator, own_means)
    name = next(chain.from_iterable(means_of_ranks), None)
    if name is not None:
        raise UserError(
            f"sums.add takes totals over a batch but got the mean of {name!r}, so the logged "
            "value would be too small by a factor of the batch size",
            advice="write sums.record(loss, metrics, len(y)), which takes means, or "
            f"sums.add(len(y), {name}={name} * len(y)), where y is the batch's labels",
        )
