"""Show a comparison as text: warnings, a table of settings and figures, and notes below it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from rich.markup import escape

from common.console import CONSOLE
from common.system.printable import printable
from common.tables import markdown_table, print_table
from common.tools.compare.comparison import FIGURES, RATIOS, Comparison, RunFigures
from common.track.names import EFFICIENCY, PEAK, UNKNOWN, Metric, describe

MOST_COLUMNS = 5  # up to this many runs stand in columns, more runs stand in rows


class FigureRow(NamedTuple):
    """One metric of all runs."""

    metric: Metric
    values: list[float | None]  # one for each run; None if unknown
    kind_name: str = ""  # the figure that says what a value is of: a split, or whose memory
    ratio_name: str = ""  # the figure that holds the ratio to the baseline


def warnings(comparison: Comparison) -> list[str]:
    """Return one sentence for each run that can't fairly be compared with the baseline."""
    pairs_by_run: dict[str, list[str]] = {}
    for difference in comparison.unfair:
        baseline_value = value_text(difference["baseline_value"])
        pair = f"{difference['what']} {baseline_value} and {value_text(difference['value'])}"
        pairs_by_run.setdefault(difference["run"], []).append(pair)
    baseline = comparison.runs[0].name
    return [f"{baseline} and {run}: {'; '.join(pairs)}" for run, pairs in pairs_by_run.items()]


def notes(comparison: Comparison) -> list[str]:
    """Return sentences about runs that have not finished, and about the target."""
    lines = []
    for run, figures in zip(comparison.runs, comparison.figures, strict=True):
        if run.status != "finished":
            reason = f": {run.reason}" if run.reason else ""
            lines.append(f"{run.name} is {figures['status']}{reason}")
        if not run.summary:
            lines.append(f"{run.name}: throughput is the median of its log intervals so far")
    if comparison.target is not None and not comparison.target_is_given:
        advice = "choose another with --target"
        lines.append(f"{target_text(comparison)} is the worst of the runs' best; {advice}")
    return lines


def target_text(comparison: Comparison) -> str:
    """Return the target with the label of its metric, such as ``accuracy 0.9000``."""
    metric = describe(comparison.runs[0].goal)
    return f"{metric.label} {metric.text(comparison.target)}"


def table_cells(comparison: Comparison) -> list[list[str]]:
    """Return the table as rows of cells, the heading first.

    Up to `MOST_COLUMNS` runs have a column each. More runs have a row each.
    """
    names = [run.name for run in comparison.runs]
    if len(names) > 1:
        names[0] += " (baseline)"
    rows = [["", *names], ["status", *(figures["status"] for figures in comparison.figures)]]
    for label, values in comparison.differences.items():
        cells = [value_text(value) for value in values]
        if len(set(cells)) > 1:  # values that differ may look the same as text
            rows.append([label, *cells])
    for row in figure_rows(comparison):
        if any(value is not None for value in row.values):
            rows.append(cells_of_figures(row, comparison))
    if comparison.target is not None:
        times = map(time_to_target, comparison.figures)
        rows.append([f"time to {target_text(comparison)}", *times])
    return arranged(rows)


def cells_of_figures(row: FigureRow, comparison: Comparison) -> list[str]:
    """Return a metric's heading and its cells, with ratios to the baseline.

    A value is of a certain split, or of a certain memory. The heading names it if it is the same
    for all runs. Otherwise each cell names its own.
    """
    # Places of the runs whose value is known.
    known = [index for index, value in enumerate(row.values) if value is not None]
    kinds = {index: comparison.figures[index][row.kind_name] for index in known if row.kind_name}
    different_kinds = set(kinds.values())
    cells = [row.metric.text(value) for value in row.values]
    for index in known:
        if len(different_kinds) > 1:
            cells[index] += f" ({kinds[index]})"
        ratio = comparison.figures[index][row.ratio_name] if row.ratio_name else None
        if index > 0 and ratio is not None:  # 0 is the baseline
            cells[index] += f" ({ratio:.2f}×)"
    heading = row.metric.heading
    if len(different_kinds) == 1:
        heading += f", {different_kinds.pop()}"
    return [heading, *cells]


def arranged(rows: list[list[str]]) -> list[list[str]]:
    """Transpose a table with a column for each run if there are too many columns."""
    is_wide = len(rows[0]) - 1 > MOST_COLUMNS
    return [list(cells) for cells in zip(*rows, strict=True)] if is_wide else rows


def figure_rows(comparison: Comparison) -> Iterator[FigureRow]:
    """Yield the metrics in the table's order: speed and memory, the objective, other metrics.

    Runs with different objectives share the rows of the objective; each has its own metric there.
    """
    all_figures = comparison.figures
    for name in (*FIGURES, EFFICIENCY):
        values = [figures[name] for figures in all_figures]
        kind_name = "memory_kind" if name == PEAK else ""
        yield FigureRow(describe(name), values, kind_name, RATIOS.get(name, ""))
    goals = [run.objective.metric for run in comparison.runs]
    goal = describe(goals[0])
    label = goal.label if len(set(goals)) == 1 else "objective"
    final = [figures["final"].get(name) for figures, name in zip(all_figures, goals, strict=True)]
    yield FigureRow(replace(goal, label=f"final {label}"), final, "final_split")
    best = [figures["best"] for figures in all_figures]
    yield FigureRow(replace(goal, label=f"best {label}"), best, "best_split")
    for name in dict.fromkeys(chain(*(figures["final"] for figures in all_figures))):
        metric = describe(name)
        if name not in goals and metric.panel:
            values = [figures["final"].get(name) for figures in all_figures]
            yield FigureRow(replace(metric, label=f"final {metric.label}"), values, "final_split")


def time_to_target(figures: RunFigures) -> str:
    """Return the cell of a run in the row of the target."""
    if figures["reached_target"] is None:  # there is no target, or no evaluation
        return UNKNOWN
    if not figures["reached_target"]:
        return "not reached"
    seconds = describe("time/train_seconds").text(figures["seconds_to_target"])
    return f"{seconds} (step {figures['steps_to_target']:,.0f})"


def value_text(value: object) -> str:
    """Return a setting of a run, as JSON has it, in the form of a table's cell."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value)) or UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def show(comparison: Comparison) -> None:
    """Print the comparison: warnings first, then the table, then notes."""
    for warning in warnings(comparison):
        CONSOLE.print(f"[yellow]not comparable[/yellow] {escape(printable(warning))}")
    print_table(table_cells(comparison))
    for note in notes(comparison):
        CONSOLE.print(printable(note), markup=False)


def as_markdown(comparison: Comparison) -> str:
    lines = [f"> **not comparable** {printable(warning)}\n" for warning in warnings(comparison)]
    lines += markdown_table(table_cells(comparison))
    lines += [f"\n{printable(note)}" for note in notes(comparison)]
    return "\n".join(lines)
