"""Draws the conclusion of a reproduction: the result, its explanation, and the exit status."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.system.wording import counted, listed
from common.tools.reproduce.receipt import (
    FactDifference,
    FigureDifference,
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


def exit_status_of(
    result: Result,
    differences: Sequence[FactDifference],
    nondeterministic_device: str | None,
) -> int:
    """Return the exit status of the command; 0 means that the run was reproduced.

    Bits that differ without a known cause are a failure, however small the difference is.

    Args:
        differences: the facts that differ.
        nondeterministic_device: see `ComparedRun.nondeterministic_device`.
    """
    if result == "equal bits":
        return 0
    if result == "another experiment":
        return ANOTHER_EXPERIMENT
    has_known_cause = any(difference.changes_bits for difference in differences)
    if not has_known_cause and nondeterministic_device is None:
        return UNEXPLAINED
    return 0 if result == "within tolerance" else BEYOND_TOLERANCE


def explanation_of(
    result: Result,
    weights: WeightsCompared,
    differences: Sequence[FactDifference],
    gaps: Sequence[str],
    nondeterministic_device: str | None,
) -> str:
    """Return a sentence that names the causes of the result, or says that no fact explains it.

    Args:
        weights: the comparison of the weights. If they are equal, training is not the cause.
        differences: the facts that differ, the likelier causes first.
        gaps: sentences on what the old run did not record.
        nondeterministic_device: see `ComparedRun.nondeterministic_device`.
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
    return unexplained_in_words(weights, differences, gaps, nondeterministic_device)


def unexplained_in_words(
    weights: WeightsCompared,
    differences: Sequence[FactDifference],
    gaps: Sequence[str],
    nondeterministic_device: str | None,
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
    if gaps:
        sentence += f", as far as the run recorded them ({'; '.join(gaps)})"
    if nondeterministic_device is not None:
        return (
            f"{sentence}; this may explain it: both runs trained on {nondeterministic_device} "
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


def fact_in_words(difference: FactDifference) -> str:
    """Return a differing fact as a clause, such as "--seed was 0 and is 1"."""
    return f"{difference.fact} was {difference.before} and is {difference.now}"


def figure_in_words(difference: FigureDifference) -> str:
    """Return a differing figure with both values, in full precision."""
    before = number_in_words(difference.before)
    return f"{difference.figure} {before} and now {number_in_words(difference.now)}"


def number_in_words(value: float | None) -> str:
    """Return a figure in full precision. None stands for NaN, or for a figure that a run lacks."""
    return "NaN or missing" if value is None else repr(value)


def rows_in_words(rows: RowsCompared) -> str:
    """Return a text on the first difference between the rows, and on the same figure at the end.

    The text also says how many rows are equal if all are, how many are missing, and of how many the
    training figures were left out.
    """
    remarks = ""
    if rows.missing:
        count = counted(len(rows.missing), "row is", "rows are")
        remarks += f"; {count} missing, the first of update {rows.missing[0]}"
    if rows.left_out:
        remarks += f"; {left_out_in_words(rows.left_out)}"
    if rows.first is None or rows.at_end is None:
        return f"{counted(rows.rows, 'row is', 'rows are')} equal{remarks}"
    text = f"first difference in the row of update {rows.first.update}: "
    text += figure_in_words(rows.first)
    if rows.previous_update is not None:
        text += f" (the row of update {rows.previous_update} is equal)"
    if rows.at_end.update != rows.first.update:
        text += f"; at update {rows.at_end.update}: {figure_in_words(rows.at_end)}"
    return f"{text}{remarks}"


def left_out_in_words(steps: Sequence[int]) -> str:
    """Return a clause on rows whose training figures were not compared.

    Args:
        steps: the updates of these rows, at least one.
    """
    rows = counted(len(steps), "row")
    return f"training figures of {rows} not compared, because --log-every sets other log lines"


def weights_in_words(weights: WeightsCompared) -> str:
    """Return a text on the first checkpoint that differs, and on the exported weights."""
    if weights.first_differing is not None:
        files = ", ".join(weights.differing_files)
        text = f"the checkpoint of update {weights.first_differing} differs ({files})"
    elif weights.checkpoints:
        text = f"{counted(weights.checkpoints, 'checkpoint is', 'checkpoints are')} equal"
    else:
        text = "no checkpoint can be compared"
    if weights.exported_is_equal is None:
        return f"{text}; there are no exported weights to compare"
    if weights.exported_is_equal:
        return f"{text}; the exported weights are equal"
    return f"{text}; the exported weights differ: {weights.exported_difference}"


def figure_text(value: float | None) -> str:
    """Return a final figure with six digits. None stands for NaN, or for a missing figure."""
    return "NaN or missing" if value is None else f"{value:.6g}"


def final_in_words(final: FinalCompared) -> str:
    """Return a text on the largest difference of the final figures, and on the tolerance."""
    if final.largest is None:
        return "there are no final figures to compare"
    if final.largest_difference == 0:
        return "all final figures are equal"
    before, now = (figure_text(value) for value in final.figures[final.largest])
    distance = "unknown" if final.largest_difference is None else f"{final.largest_difference:.2g}"
    verdict = "within" if final.is_within_tolerance else "beyond"
    text = (
        f"{final.largest} differs most, {before} and now {now} (by {distance}): {verdict} the "
        f"tolerance of {final.allowed[final.largest]:.2g}"
    )
    if final.samples is not None:
        return f"{text}, two standard errors with {final.samples:,} samples"
    return text
