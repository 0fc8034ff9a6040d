"""Checks the figures that a recipe's evaluation returned."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

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


def refuse_evident_mistakes(
    figures: Metrics, batch_sizes: Sequence[int], accelerator: Accelerator
) -> None:
    """Raise a `UserError` if a rehearsal shows a wrong count, mean or total; called on all ranks.

    The logged figures would depend on the batch size and the number of processes. All ranks raise
    the error, even if only one of them saw the mistake.

    Args:
        figures: those of the rehearsal, whose second batch repeats the first; see `FirstBatches`.
        batch_sizes: the samples of each batch that this rank's loaders gave to the rehearsal.
    """
    own_mistakes: list[Mistake] = []
    if isinstance(figures, Evaluation):
        own_mistakes = evident_mistakes(figures, batch_sizes)
    first = next(chain.from_iterable(gather_from_ranks(accelerator, own_mistakes)), None)
    if first is not None:
        raise UserError(first.problem, advice=first.advice)


class Mistake(NamedTuple):
    """What the rehearsal shows to be wrong, and what to do."""

    problem: str
    advice: str


def evident_mistakes(figures: Evaluation, batch_sizes: Sequence[int]) -> list[Mistake]:
    """Return the mistakes that the two batches of a rehearsal show on this rank."""
    batches = figures.first_batches
    mistakes = []
    for call, count in batches.wrong_counts(batch_sizes, figures.finish).items():
        problem = (
            f"{call} got {count:g} as the number of samples both of a batch of {batch_sizes[0]} "
            f"and of one of {batch_sizes[1]}"
        )
        mistakes.append(Mistake(problem, "pass len(y), where y is the batch's labels"))
    for name in batches.means_for_totals(figures.finish):
        problem = (
            f"sums.add takes totals over a batch but got the mean of {name!r}, so the logged "
            "value would be too small by a factor of the batch size"
        )
        advice = (
            "write sums.record(loss, metrics, len(y)), which takes means, or "
            f"sums.add(len(y), {name}={name} * len(y)), where y is the batch's labels"
        )
        mistakes.append(Mistake(problem, advice))
    for name in batches.totals_for_means():
        problem = (
            f"the evaluation got the total of {name!r} over a batch where it takes the mean, so "
            "the logged value would grow with the batch size"
        )
        advice = "pass the mean of the batch, or for a metric the values of all samples"
        mistakes.append(Mistake(problem, advice))
    return mistakes
