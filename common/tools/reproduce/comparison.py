"""Compares two runs: their rows, the digests of their weights, and their final figures."""

import math
from collections.abc import Mapping

from common.checkpoints.tensors import read_tensors
from common.errors import UserError
from common.metric_names import TRAINING_LOSS
from common.objective import EVALUATION_PREFIXES, Objective
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.records import MODEL_FOLDER
from common.tools.reproduce.comparable_rows import ComparableRows, comparable_rows
from common.tools.reproduce.compared_run import ComparedRun
from common.tools.reproduce.receipt import (
    FigureDifference,
    FinalCompared,
    RowsCompared,
    WeightsCompared,
)
from common.tools.rows import first_differing_figure, number_or_none, without_clock
from common.tools.tensors import first_differing_tensor
from common.track.names import is_proportion

TOLERANCE = 0.02  # the relative tolerance for figures that are not accuracies
# The relative tolerance for a figure beside an accuracy of the same split. A few samples can change
# a loss by far more than 2 %, and so does another seed.
LOOSE_TOLERANCE = 0.5
PairedFigures = dict[str, tuple[float | None, float | None]]  # old and new value, by name


def compare_rows(old: ComparedRun, new: ComparedRun) -> RowsCompared:
    """Compare the rows that two runs have for the same updates, without figures of the clock.

    If the old run was stopped, the new run may have later rows, which are not compared. If the runs
    have their log lines at different updates, see `comparable_rows`.
    """
    rows = comparable_rows(old, new)
    common_steps = rows.common_steps
    compared = RowsCompared(
        rows=len(common_steps),
        missing=[step for step in rows.old if step not in rows.new],
        left_out=rows.left_out,
    )
    last_equal_update = None  # that of the last row before the first difference
    for step in common_steps:
        figure = first_differing_figure(rows.old[step], rows.new[step])
        if figure is not None:
            differences = {
                "first": difference_at(step, figure, rows),
                "previous_update": last_equal_update,
                "at_end": difference_at(common_steps[-1], figure, rows),
            }
            return compared.model_copy(update=differences)
        last_equal_update = step
    return compared.model_copy(update={"previous_update": last_equal_update})


def difference_at(step: int, figure: str, rows: ComparableRows) -> FigureDifference:
    """Return both runs' values of a figure after an update for which both have a row."""
    return FigureDifference(
        update=step,
        figure=figure,
        before=number_or_none(rows.old[step].get(figure)),
        now=number_or_none(rows.new[step].get(figure)),
    )


def compare_weights(old: ComparedRun, new: ComparedRun) -> WeightsCompared:
    """Compare the digests of the checkpoints that both runs wrote, and of the exported weights.

    The clock decides when some checkpoints are written, so each run may have some that the other
    lacks. These are not compared.
    """
    common_steps = [step for step in sorted(old.digests) if step in new.digests]
    first_differing_step = None
    differing_files: list[str] = []
    for step in common_steps:
        differing_files = files_that_differ(old.digests[step], new.digests[step])
        if differing_files:
            first_differing_step = step
            break
    exported_is_equal = None
    exported_difference = None
    if old.exported_digest is not None and new.exported_digest is not None:
        exported_is_equal = old.exported_digest == new.exported_digest
        if not exported_is_equal:
            exported_difference = difference_of_exports(old, new)
    return WeightsCompared(
        checkpoints=len(common_steps),
        first_differing=first_differing_step,
        differing_files=differing_files,
        exported_is_equal=exported_is_equal,
        exported_difference=exported_difference,
    )


def files_that_differ(old_digests: Mapping[str, str], new_digests: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the files whose digests differ, or that one checkpoint lacks."""
    names = sorted({*old_digests, *new_digests})
    return [name for name in names if old_digests.get(name) != new_digests.get(name)]


def difference_of_exports(old: ComparedRun, new: ComparedRun) -> str:
    """Return a text that says how two exported models differ, or why that is unknown."""
    if old.is_published:
        return "the digests differ, and a published run has no weights that would show where"
    try:
        old_tensors = read_tensors(old.directory / MODEL_FOLDER / WEIGHTS)
        new_tensors = read_tensors(new.directory / MODEL_FOLDER / WEIGHTS)
    except UserError as error:
        return error.problem
    return (
        first_differing_tensor(old_tensors, new_tensors) or "the files differ, but no tensor does"
    )


def compare_final(old: ComparedRun, new: ComparedRun, tolerance: float | None) -> FinalCompared:
    """Compare the figures of the final evaluation, or of the last common row if a run has none.

    A figure that only one run has is beyond the tolerance, and so is a result without any figures.

    Args:
        tolerance: the tolerance for all figures, relative to the larger of two values. If it is
            None, `allowed_difference` chooses one for each figure.
    """
    figures: PairedFigures = {}
    if has_evaluation(old) and has_evaluation(new):
        figures = paired_figures(
            old.stored.summary.figures, new.stored.summary.figures, EVALUATION_PREFIXES
        )
    if not figures:
        rows = comparable_rows(old, new)
        if rows.common_steps:
            last_step = rows.common_steps[-1]
            old_row = without_clock(rows.old[last_step])
            new_row = without_clock(rows.new[last_step])
            figures = paired_figures(old_row, new_row, (TRAINING_LOSS, *EVALUATION_PREFIXES))
    if not figures:
        return FinalCompared(is_within_tolerance=False)
    allowed = {}
    shares = {}  # each difference as a multiple of the allowed one
    for name, values in figures.items():
        allowed[name] = allowed_difference(name, figures, old.stored.objective, tolerance)
        shares[name] = share_of_allowed(*values, allowed[name])
    largest = max(shares, key=shares.__getitem__)
    return FinalCompared(
        figures={name: [*values] for name, values in figures.items()},
        allowed=allowed,
        largest=largest,
        largest_difference=difference_between(*figures[largest]),
        samples=None if tolerance is not None else samples_behind(largest, figures),
        is_within_tolerance=shares[largest] <= 1,
    )


def has_evaluation(run: ComparedRun) -> bool:
    """Whether the summary of a run has figures of an evaluation; an unfinished run has none."""
    return any(name.startswith(EVALUATION_PREFIXES) for name in run.stored.summary.figures)


def allowed_difference(
    name: str, figures: PairedFigures, objective: Objective, tolerance: float | None
) -> float:
    """Return the largest absolute difference of a figure that is within the tolerance.

    For an accuracy over n samples, it is two standard errors of the difference of two proportions:
    twice the square root of 2 p (1 - p) / n, where p is the mean of both. For other figures, it is
    `LOOSE_TOLERANCE` or `TOLERANCE` times the larger value; see `is_secondary`. It is 0 if a value
    is unknown, and for the number of samples, which must be equal on any machine.

    Args:
        objective: the run's objective.
        tolerance: a tolerance, relative to the larger value, for all figures but the number of
            samples; None for the rules above.
    """
    old_value, new_value = figures[name]
    if old_value is None or new_value is None or is_number_of_samples(name):
        return 0.0
    samples = samples_behind(name, figures)
    if tolerance is None and samples is not None:
        mean = (old_value + new_value) / 2
        return 2 * math.sqrt(2 * mean * (1 - mean) / samples)
    relative_tolerance = tolerance
    if relative_tolerance is None:
        is_loose = is_secondary(name, figures, objective)
        relative_tolerance = LOOSE_TOLERANCE if is_loose else TOLERANCE
    return relative_tolerance * max(abs(old_value), abs(new_value))


def is_secondary(name: str, figures: PairedFigures, objective: Objective) -> bool:
    """Whether a figure, such as a loss or F1, only adds to an accuracy of the same split.

    The objective itself is not secondary, nor are accuracies.
    """
    split, _, metric = name.partition("/")
    is_objective = metric == objective.metric or name == objective.best_key
    if is_objective or is_proportion(name):
        return False
    others_of_split = [other for other in figures if other.partition("/")[0] == split]
    return any(samples_behind(other, figures) is not None for other in others_of_split)


def is_number_of_samples(name: str) -> bool:
    """Whether a figure is the number of samples of an evaluation, such as ``test/count``."""
    return name.endswith("/count")


def samples_behind(name: str, figures: PairedFigures) -> int | None:
    """Return the number of samples behind an accuracy; None for other metrics.

    It is also None if a value is not a proportion, or if the runs did not log the number of samples
    or evaluated different numbers.
    """
    if not is_proportion(name):
        return None
    if not all(value is not None and 0 <= value <= 1 for value in figures[name]):
        return None
    split = name.partition("/")[0]
    old_count, new_count = figures.get(f"{split}/count", (None, None))
    if not old_count or old_count != new_count:
        return None
    return round(old_count)


def difference_between(old_value: float | None, new_value: float | None) -> float | None:
    """Return the absolute difference of two values; None if only one of them is unknown.

    Two unknown values count as equal.
    """
    if old_value == new_value:
        return 0.0
    if old_value is None or new_value is None:
        return None
    return abs(old_value - new_value)


def share_of_allowed(old_value: float | None, new_value: float | None, allowed: float) -> float:
    """Return the difference of two values as a multiple of the allowed one.

    The result is infinite if only one value is unknown, or if they differ and must not.
    """
    difference = difference_between(old_value, new_value)
    if difference == 0:
        return 0.0
    return math.inf if difference is None or allowed == 0 else difference / allowed


def paired_figures(
    old_figures: Mapping[str, object],
    new_figures: Mapping[str, object],
    prefixes: tuple[str, ...],
) -> PairedFigures:
    """Return both values of each figure whose name begins with one of the prefixes.

    A value is None if it is NaN, or if only the other run has the figure.
    """
    pairs: PairedFigures = {}
    for name in dict.fromkeys([*old_figures, *new_figures]):
        if name.startswith(prefixes):
            old_value = number_or_none(old_figures.get(name))
            new_value = number_or_none(new_figures.get(name))
            pairs[name] = (old_value, new_value)
    return pairs
