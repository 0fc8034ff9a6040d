"""Warns of finished runs whose objective has no value, so that means leave them out."""

from collections.abc import Sequence

from common.system.wording import counted, listed
from common.tools.compare.comparison import Comparison
from common.tools.compare.groups import RunGroup
from common.tools.compare.repetitions import finished_indices
from common.tools.compare.rows import FigureRow, objective_rows

MISSING_VALUES = "missing values"  # the label of the warnings


def missing_value_warnings(comparison: Comparison) -> list[str]:
    """Return a sentence for each group with finished runs that have no value of the objective.

    Such a value is NaN, infinite or missing. If no run was evaluated, there is nothing to warn of.
    """
    is_evaluated = any(figures.final for figures in comparison.figures)
    warnings = []
    for group in comparison.groups:
        first_run = comparison.runs[group.run_indices[0]]
        rows = []
        for row in objective_rows(comparison, first_run.objective):
            if is_evaluated or any(value is not None for value in row.values):
                rows.append(row)
        warnings += warnings_of_group(comparison, group, rows)
    return warnings


def warnings_of_group(
    comparison: Comparison, group: RunGroup, rows: Sequence[FigureRow]
) -> list[str]:
    """Return the sentences on one group: one for all figures that the same runs lack.

    Args:
        rows: the figures of the group's objective.
    """
    finished = finished_indices(comparison, group)
    labels_by_runs: dict[tuple[int, ...], list[str]] = {}
    for row in rows:
        missing = tuple(index for index in finished if row.values[index] is None)
        if missing:
            labels_by_runs.setdefault(missing, []).append(row.metric.label)
    warnings = []
    for missing, labels in labels_by_runs.items():
        names = listed([comparison.runs[index].name for index in missing])
        text = f"{names} finished with a {' and a '.join(labels)} that is NaN or missing"
        if len(missing) == len(finished):
            warnings.append(f"{text}: there is no value of {group.label} to compare")
        else:
            runs = counted(len(missing), "run")
            warnings.append(f"{text}: the mean of {group.label} leaves out {runs}")
    return warnings
