"""Draws the conclusion of a reproduction: the result, its explanation, and the exit status."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.system.wording import listed
from common.tools.reproduce.compared_run import ComparedRun
from common.tools.reproduce.comparison import compare_final, compare_rows, compare_weights
from common.tools.reproduce.comparison_in_words import fact_in_words
from common.tools.reproduce.receipt import (
    FactDifference,
    FinalCompared,
    Result,
    RowsCompared,
    WeightsCompared,
)

UNEXPLAINED = 3  # exit status: bits differ, but no fact that changes bits differs
BEYOND_TOLERANCE = 4  # exit status: facts differ, and the final figures exceed the tolerance
ANOTHER_EXPERIMENT = 5  # exit status: bits differ, and so do a flag, the code or the data


@dataclass(frozen=True)
class Conclusion:
    """The comparison of two runs, and the result."""

    rows: RowsCompared
    weights: WeightsCompared
    final: FinalCompared
    result: Result
    exit_status: int
    explanation: str
    differences: list[FactDifference]  # the facts in which the runs differ


def draw_conclusion(
    old: ComparedRun,
    new: ComparedRun,
    differences: Sequence[FactDifference],
    tolerance: float | None,
) -> Conclusion:
    """Compare both runs, and return the result with its explanation.

    Args:
        differences: the facts in which the runs differ.
        tolerance: the relative tolerance for the final figures; see `compare_final`.
    """
    rows = compare_rows(old, new)
    weights = compare_weights(old, new)
    final = compare_final(old, new, tolerance)
    result = result_of(rows, weights, final, differences)
    return Conclusion(
        rows=rows,
        weights=weights,
        final=final,
        result=result,
        exit_status=exit_status_of(old, result, differences),
        explanation=explanation_of(old, result, weights, differences),
        differences=[*differences],
    )


def are_bits_equal(rows: RowsCompared, weights: WeightsCompared, final: FinalCompared) -> bool:
    """Return whether all rows, weights and final figures that could be compared are equal.

    There must be a row to compare, or equal weights if the log lines are at other updates. The new
    run must have all rows of the old one. Weights that a run lacks do not count.
    """
    has_evidence = rows.rows > 0 or (bool(rows.left_out) and has_equal_weights(weights))
    are_rows_equal = rows.first is None and not rows.missing and has_evidence
    are_weights_equal = weights.first_differing is None and weights.exported_is_equal is not False
    are_final_figures_equal = final.largest is None or final.largest_difference == 0
    return are_rows_equal and are_weights_equal and are_final_figures_equal


def has_equal_weights(weights: WeightsCompared) -> bool:
    """Return whether the exported weights are equal, and all checkpoints that both runs have."""
    return weights.exported_is_equal is True and weights.first_differing is None


def result_of(
    rows: RowsCompared,
    weights: WeightsCompared,
    final: FinalCompared,
    differences: Sequence[FactDifference],
) -> Result:
    """Return the result of a comparison.

    The tolerance allows for a different machine, different versions, threads or processes. With a
    different flag, code or data set, similar figures would not show that the run was reproduced.

    A run that was cut short lacks rows, and is not within the tolerance. A run with equal weights
    was not cut short.
    """
    if are_bits_equal(rows, weights, final):
        return "equal bits"
    if any(difference.defines_experiment for difference in differences):
        return "another experiment"
    is_complete = not rows.missing or has_equal_weights(weights)
    if final.is_within_tolerance and is_complete:
        return "within tolerance"
    return "beyond tolerance"


def exit_status_of(old: ComparedRun, result: Result, differences: Sequence[FactDifference]) -> int:
    """Return the exit status of the command; 0 means that the run was reproduced.

    Bits that differ without a known cause are a failure, however small the difference is.

    Args:
        old: the old run. Its device may round differently in each run.
        differences: the facts that differ.
    """
    if result == "equal bits":
        return 0
    if result == "another experiment":
        return ANOTHER_EXPERIMENT
    has_known_cause = any(difference.changes_bits for difference in differences)
    if not has_known_cause and old.nondeterministic_device is None:
        return UNEXPLAINED
    return 0 if result == "within tolerance" else BEYOND_TOLERANCE


def explanation_of(
    old: ComparedRun,
    result: Result,
    weights: WeightsCompared,
    differences: Sequence[FactDifference],
) -> str:
    """Return a sentence that names the causes of the result, or says that no fact explains it.

    Args:
        old: the old run. Its gaps and its device may explain the result.
        weights: the comparison of the weights. If they are equal, training is not the cause.
        differences: the facts that differ, the likelier causes first.
    """
    causes = [fact_in_words(difference) for difference in differences if difference.changes_bits]
    if result == "equal bits":
        if not causes:
            return "no fact that changes bits differs"
        return f"the bits are equal although {listed(causes)}"
    if result == "another experiment":
        changes = [
            fact_in_words(difference) for difference in differences if difference.defines_experiment
        ]
        return f"this is a different experiment: {'; '.join(changes)}"
    if len(causes) == 1:
        return f"this explains it: {causes[0]}"
    if causes:
        return f"one or several of these explain it: {'; '.join(causes)}"
    return unexplained_in_words(old, weights, differences)


def unexplained_in_words(
    old: ComparedRun, weights: WeightsCompared, differences: Sequence[FactDifference]
) -> str:
    """Return a sentence for bits that differ although no fact that changes bits does.

    The arguments are those of `explanation_of`.
    """
    sentence = (
        "no recorded fact differs: code, flags, data, device, threads, processes and versions are "
        "the same"
    )
    if differences:
        others = listed([fact_in_words(difference) for difference in differences])
        sentence = f"the only facts that differ should change no bits ({others})"
    gaps = old.gaps()
    if gaps:
        sentence += f", as far as the run recorded them ({'; '.join(gaps)})"
    if old.nondeterministic_device is not None:
        return (
            f"{sentence}; this may explain it: both runs trained on {old.nondeterministic_device} "
            "without --deterministic, and its kernels may then round differently in each run"
        )
    if gaps:
        return sentence
    alternative = "one of them matters, or " if differences else ""
    if has_equal_weights(weights):
        return (
            f"{sentence}, and all weights are equal, so {alternative}the record of the old run was "
            "changed, or an evaluation or a logged figure depends on something that the seed does "
            "not fix"
        )
    return (
        f"{sentence}, so {alternative}the recipe does something that its seed does not fix "
        "(recipes prove looks for it)"
    )
