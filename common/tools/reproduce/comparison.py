"""Compares two runs: their rows, the digests of their weights, and their final figures."""

import math
from collections.abc import Mapping

from common.checkpoints.tensors import read_tensors
from common.errors import UserError
from common.objective import PREFIXES
from common.run_directory.finished_model import WEIGHTS
from common.tools.prove.results import first_differing_tensor
from common.tools.reproduce.past_run import PastRun
from common.tools.reproduce.receipt import (
    FigureDifference,
    FinalCompared,
    RowsCompared,
    WeightsCompared,
)
from common.tools.rows import first_differing_figure, number_or_none, without_clock
from common.track.names import is_proportion

TOLERANCE = 0.02  # of final figures that are no accuracies; relative
EVALUATED = tuple(f"{prefix}/" for prefix in dict.fromkeys(PREFIXES.values()))
PairedFigures = dict[str, tuple[float | None, float | None]]  # before and now, by name


def compare_rows(before: PastRun, now: PastRun) -> RowsCompared:
    """Compare the rows of two runs by update, without the figures that depend on the clock.

    Rows of the new run after the last one of the old run are not compared. A run that was stopped
    has none there.
    """
    common = [step for step in before.rows if step in now.rows]
    missing = [step for step in before.rows if step not in now.rows]
    previous_update = None
    for step in common:
        figure = first_differing_figure(before.rows[step], now.rows[step])
        if figure is not None:
            last = common[-1]
            return RowsCompared(
                rows=len(common),
                missing=missing,
                first=difference_at(step, figure, before, now),
                previous_update=previous_update,
                at_end=difference_at(last, figure, before, now),
            )
        previous_update = step
    return RowsCompared(rows=len(common), missing=missing, previous_update=previous_update)


def difference_at(step: int, figure: str, before: PastRun, now: PastRun) -> FigureDifference:
    """Return the values of a figure in the rows of an update."""
    return FigureDifference(
        update=step,
        figure=figure,
        before=number_or_none(before.rows[step].get(figure)),
        now=number_or_none(now.rows[step].get(figure)),
    )


def compare_weights(before: PastRun, now: PastRun) -> WeightsCompared:
    """Compare the digests of the checkpoints that both runs wrote, and of the exported weights.

    The time of some checkpoints depends on the clock, so a run may have some that the other lacks.
    """
    common = [step for step in sorted(before.digests) if step in now.digests]
    first_differing = None
    files: list[str] = []
    for step in common:
        first = before.digests[step]
        second = now.digests[step]
        files = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
        if files:
            first_differing = step
            break
    exported_is_equal = None
    difference = None
    if before.exported_digest is not None and now.exported_digest is not None:
        exported_is_equal = before.exported_digest == now.exported_digest
        if not exported_is_equal:
            difference = difference_of_exports(before, now)
    return WeightsCompared(
        checkpoints=len(common),
        first_differing=first_differing,
        differing_files=files,
        exported_is_equal=exported_is_equal,
        exported_difference=difference,
    )


def difference_of_exports(before: PastRun, now: PastRun) -> str:
    """Return in words how two exported models differ."""
    if before.is_published:
        return "the digests differ, and a published run has no weights that would show where"
    try:
        first = read_tensors(before.directory / "model" / WEIGHTS)
        second = read_tensors(now.directory / "model" / WEIGHTS)
    except UserError as error:
        return error.problem
    return first_differing_tensor(first, second) or "the files differ, but no tensor does"


def compare_final(before: PastRun, now: PastRun, tolerance: float | None) -> FinalCompared:
    """Compare the figures of the final evaluation; without one, those of the last common row.

    Args:
        tolerance: for all figures, relative to the larger of two values; None: see
            `allowed_difference`.
    """
    figures = paired_figures(before.summary, now.summary, EVALUATED)
    if not figures:
        common = [step for step in before.rows if step in now.rows]
        if common:
            first = without_clock(before.rows[common[-1]])
            second = without_clock(now.rows[common[-1]])
            figures = paired_figures(first, second, ("train/loss", *EVALUATED))
    if not figures:
        return FinalCompared(is_within_tolerance=False)
    allowed = {}
    shares = {}  # of the allowed difference
    for name, values in figures.items():
        allowed[name] = allowed_difference(name, figures, tolerance)
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


def allowed_difference(name: str, figures: PairedFigures, tolerance: float | None) -> float:
    """Return the largest difference of a figure that counts as equal, as an absolute value.

    For an accuracy over n samples, it is two standard errors of the difference of two proportions,
    twice the square root of 2 p (1 - p) / n, where p is the mean of both. For other figures it is
    `TOLERANCE`, relative to the larger value.

    Args:
        tolerance: a relative one for all figures, which replaces these rules.
    """
    before, now = figures[name]
    if before is None or now is None:
        return 0.0
    samples = samples_behind(name, figures)
    if tolerance is None and samples is not None:
        mean = (before + now) / 2
        return 2 * math.sqrt(2 * mean * (1 - mean) / samples)
    relative = TOLERANCE if tolerance is None else tolerance
    return relative * max(abs(before), abs(now))


def samples_behind(name: str, figures: PairedFigures) -> int | None:
    """Return over how many samples an accuracy was taken; None for figures of another sort.

    Also None if the runs did not evaluate equally many samples, or did not log their number.
    """
    values = figures[name]
    counts = figures.get(f"{name.partition('/')[0]}/count", (None, None))
    is_share = all(value is not None and 0 <= value <= 1 for value in values)
    if not is_proportion(name) or not is_share or not counts[0] or counts[0] != counts[1]:
        return None
    return round(counts[0])


def difference_between(before: float | None, now: float | None) -> float | None:
    """Return how far two values are apart; None if one alone is unknown."""
    if before == now:
        return 0.0
    return None if before is None or now is None else abs(before - now)


def share_of_allowed(before: float | None, now: float | None, allowed: float) -> float:
    """Return the difference of two values as a multiple of the allowed one."""
    difference = difference_between(before, now)
    if difference == 0:
        return 0.0
    return math.inf if difference is None or allowed == 0 else difference / allowed


def paired_figures(
    before: Mapping[str, object], now: Mapping[str, object], begins: tuple[str, ...]
) -> PairedFigures:
    """Return both values of each figure whose name begins so."""
    names = [name for name in dict.fromkeys([*before, *now]) if name.startswith(begins)]
    return {
        name: (number_or_none(before.get(name)), number_or_none(now.get(name))) for name in names
    }
