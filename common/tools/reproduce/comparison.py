"""Compares two runs: their rows, the digests of their weights, and their final figures."""

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

EVALUATED = tuple(f"{prefix}/" for prefix in dict.fromkeys(PREFIXES.values()))


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
    try:
        first = read_tensors(before.directory / "model" / WEIGHTS)
        second = read_tensors(now.directory / "model" / WEIGHTS)
    except UserError as error:
        return error.problem
    return first_differing_tensor(first, second) or "the files differ, but no tensor does"


def compare_final(before: PastRun, now: PastRun, tolerance: float) -> FinalCompared:
    """Compare the figures of the final evaluation; without one, those of the last common row.

    Args:
        tolerance: relative to the larger of two values.
    """
    figures = paired_figures(before.summary, now.summary, EVALUATED)
    if not figures:
        common = [step for step in before.rows if step in now.rows]
        if common:
            first = without_clock(before.rows[common[-1]])
            second = without_clock(now.rows[common[-1]])
            figures = paired_figures(first, second, ("train/loss", *EVALUATED))
    distances = {name: relative_difference(*values) for name, values in figures.items()}
    largest = max(distances, key=distances.__getitem__, default=None)
    if largest is None:
        return FinalCompared(is_within_tolerance=False)
    distance = distances[largest]
    return FinalCompared(
        figures={name: [*values] for name, values in figures.items()},
        largest=largest,
        largest_difference=None if distance == float("inf") else distance,
        is_within_tolerance=distance <= tolerance,
    )


def paired_figures(
    before: Mapping[str, object], now: Mapping[str, object], begins: tuple[str, ...]
) -> dict[str, tuple[float | None, float | None]]:
    """Return both values of each figure whose name begins so."""
    names = [name for name in dict.fromkeys([*before, *now]) if name.startswith(begins)]
    return {
        name: (number_or_none(before.get(name)), number_or_none(now.get(name))) for name in names
    }


def relative_difference(before: float | None, now: float | None) -> float:
    """Return how far two values are apart, relative to the larger; infinity if one is unknown."""
    if before == now:
        return 0.0
    if before is None or now is None:
        return float("inf")
    return abs(before - now) / max(abs(before), abs(now))
