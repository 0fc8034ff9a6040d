"""Words for the comparison of two runs: for their rows, weights, final figures and facts."""

from collections.abc import Sequence

from common.system.wording import counted
from common.tools.reproduce.receipt import (
    FactDifference,
    FigureDifference,
    FinalCompared,
    RowsCompared,
    WeightsCompared,
)


def fact_in_words(difference: FactDifference) -> str:
    """Return a differing fact as a clause, such as "--seed was 0 and is 1"."""
    return f"{difference.fact} was {difference.before} and is {difference.now}"


def figure_in_words(difference: FigureDifference) -> str:
    """Return a differing figure with both values, in full precision."""
    before = full_number(difference.before)
    return f"{difference.figure} {before} and now {full_number(difference.now)}"


def full_number(value: float | None) -> str:
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


def short_number(value: float | None) -> str:
    """Return a final figure with six digits. None stands for NaN, or for a missing figure."""
    return "NaN or missing" if value is None else f"{value:.6g}"


def final_in_words(final: FinalCompared) -> str:
    """Return a text on the largest difference of the final figures, and on the tolerance."""
    if final.largest is None:
        return "there are no final figures to compare"
    if final.largest_difference == 0:
        return "all final figures are equal"
    old_value, new_value = final.figures[final.largest]
    before = short_number(old_value)
    now = short_number(new_value)
    distance = "unknown" if final.largest_difference is None else f"{final.largest_difference:.2g}"
    verdict = "within" if final.is_within_tolerance else "beyond"
    text = (
        f"{final.largest} differs most, {before} and now {now} (by {distance}): {verdict} the "
        f"tolerance of {final.allowed[final.largest]:.2g}"
    )
    if final.samples is not None:
        return f"{text}, two standard errors with {final.samples:,} samples"
    return text
