"""The table of runs: a column of settings and figures for each run."""

from common.metric_names import TRAINING_SECONDS
from common.tools.compare.comparison import Comparison
from common.tools.compare.figures import RunFigures
from common.tools.compare.rows import FigureRow, figure_rows
from common.tools.compare.setting_text import value_text
from common.track.names import UNKNOWN, metric_named

MAX_COLUMNS = 5  # up to this many runs have a column each, more runs have a row each


def run_cells(comparison: Comparison) -> list[list[str]]:
    """Return the table as rows of cells, the heading first.

    Up to `MAX_COLUMNS` runs have a column each. More runs have a row each.
    """
    names = [run.name for run in comparison.runs]
    if len(names) > 1:
        names[0] += " (baseline)"
    statuses = [figures.status for figures in comparison.figures]
    rows = [["", *names], ["status", *statuses]]
    for label, values in comparison.differences.items():
        cells = [value_text(value) for value in values]
        if len(set(cells)) > 1:  # values that look the same as text would show no difference
            rows.append([label, *cells])
    for row in figure_rows(comparison):
        if any(value is not None for value in row.values):
            rows.append(cells_of_figures(row, comparison))
        if any(error is not None for error in row.standard_errors):
            rows.append(cells_of_standard_errors(row, comparison))
    if comparison.target is not None:
        target_cells = [target_cell(figures) for figures in comparison.figures]
        rows.append([f"time to {target_text(comparison)}", *target_cells])
    return transposed_if_wide(rows)


def cells_of_figures(row: FigureRow, comparison: Comparison) -> list[str]:
    """Return a metric's heading and its cells, with ratios to the baseline.

    Runs that repeat the baseline with other seeds have no ratio: it would only show chance.
    """
    repetitions = comparison.groups[0].run_indices
    cells = []
    for index, value in enumerate(row.values):
        cell = row.metric.text(value) + row.suffix(index)
        ratio = row.ratios[index] if row.ratios else None
        if index not in repetitions and ratio is not None:
            cell += f" ({ratio:.2f}×)"
        cells.append(cell)
    return [row.heading, *cells]


def cells_of_standard_errors(row: FigureRow, comparison: Comparison) -> list[str]:
    """Return the standard errors of a row's values from the number of samples.

    The heading states the number of samples. If the runs differ in it, each cell states its own. At
    least one standard error must be known.
    """
    known_counts = set()
    for error, figures in zip(row.standard_errors, comparison.figures, strict=True):
        if error is not None:
            known_counts.add(figures.final_samples)
    cells = []
    for error, figures in zip(row.standard_errors, comparison.figures, strict=True):
        cell = row.metric.text(error)
        if error is not None and len(known_counts) > 1:
            cell += f" ({figures.final_samples:,.0f})"
        cells.append(cell)
    if len(known_counts) > 1:
        return ["  standard error (samples)", *cells]
    return [f"  standard error, {known_counts.pop():,.0f} samples", *cells]


def target_text(comparison: Comparison) -> str:
    """Return the target with the label of its metric, such as ``accuracy 0.9000``."""
    metric = metric_named(comparison.runs[0].objective_key)
    return f"{metric.label} {metric.text(comparison.target)}"


def target_cell(figures: RunFigures) -> str:
    """Return when a run reached the target, such as ``12.3 s (step 400)``, or ``not reached``."""
    if figures.reached_target is None:  # there is no target, or no evaluation
        return UNKNOWN
    if not figures.reached_target:
        return "not reached"
    seconds = metric_named(TRAINING_SECONDS).text(figures.seconds_to_target)
    return f"{seconds} (step {figures.steps_to_target:,.0f})"


def transposed_if_wide(rows: list[list[str]]) -> list[list[str]]:
    """Return a table, transposed if more than `MAX_COLUMNS` columns follow its first column.

    The first column has headings, and each other column belongs to a run or a group.
    """
    value_columns = len(rows[0]) - 1
    if value_columns <= MAX_COLUMNS:
        return rows
    return [list(column) for column in zip(*rows, strict=True)]
