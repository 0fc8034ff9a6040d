"""What a comparison says in words and figures: a table, warnings above it, notes below."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.console import CONSOLE
from common.tools.compare.comparison import FIGURES, RATIOS, Comparison
from common.track.names import EFFICIENCY, PEAK, UNKNOWN, Metric, describe

MOST_COLUMNS = 5  # more runs than this stand one a row, fewer one a column
FILE_WIDTH = 160  # characters of a line, where there is no terminal to fit into


def warnings(comparison: Comparison) -> list[str]:
    """Return one sentence for each run that can't fairly be compared with the baseline."""
    found: dict[str, list[str]] = {}
    for one in comparison.unfair:
        values = f"{written(one['baseline_value'])} and {written(one['value'])}"
        found.setdefault(one["run"], []).append(f"{one['what']} {values}")
    baseline = comparison.runs[0].name
    return [f"{baseline} and {run}: {'; '.join(pairs)}" for run, pairs in found.items()]


def notes(comparison: Comparison) -> list[str]:
    said = []
    for run, own in zip(comparison.runs, comparison.figures, strict=True):
        if run.status != "finished":
            why = f": {run.reason}" if run.reason else ""
            said.append(f"{run.name} is {own['status']}{why}")
        if not run.summary:
            said.append(f"{run.name}: throughput is the median of its log intervals so far")
    if comparison.target is not None and not comparison.target_is_given:
        asked = "choose another with --target"
        said.append(f"{target(comparison)} is the worst of the runs' best; {asked}")
    return said


def target(comparison: Comparison) -> str:
    metric = describe(comparison.runs[0].goal)
    return f"{metric.label} {metric.text(comparison.target)}"


def table_cells(comparison: Comparison) -> list[list[str]]:
    """Return the table, its heading first: a column a run, or a row where there are many."""
    figures, names = comparison.figures, [run.name for run in comparison.runs]
    names[0] += " (baseline)" if len(names) > 1 else ""
    rows = [["", *names], ["status", *(own["status"] for own in figures)]]
    for name, values in comparison.differences.items():
        cells = [written(value) for value in values]
        if len(set(cells)) > 1:
            rows.append([name, *cells])
    for metric, values, kind, ratio in shown(comparison):
        cells = [metric.text(value) for value in values]
        known = [index for index, value in enumerate(values) if value is not None]
        kinds = {figures[index][kind] for index in known if kind}
        for index in known:
            if len(kinds) > 1:
                cells[index] += f" ({figures[index][kind]})"
            if index and ratio and figures[index][ratio] is not None:
                cells[index] += f" ({figures[index][ratio]:.2f}×)"
        if known:
            of_all = f", {kinds.pop()}" if len(kinds) == 1 else ""
            rows.append([metric.heading + of_all, *cells])
    if comparison.target is not None:
        rows.append([f"time to {target(comparison)}", *map(until_target, figures)])
    return arranged(rows)


def arranged(rows: list[list[str]]) -> list[list[str]]:
    """Turn a table, of a column a run, into one of a row a run where there are many."""
    is_wide = len(rows[0]) - 1 > MOST_COLUMNS
    return [list(cells) for cells in zip(*rows, strict=True)] if is_wide else rows


def shown(comparison: Comparison) -> Iterator[tuple[Metric, list[float | None], str, str]]:
    """Yield each metric, the runs' values, and the figures that say of what, and in what ratio."""
    figures = comparison.figures
    for name in (*FIGURES, EFFICIENCY):
        kind, values = "memory_kind" if name == PEAK else "", [own[name] for own in figures]
        yield describe(name), values, kind, RATIOS.get(name, "")
    goals = [run.objective.metric for run in comparison.runs]
    goal = describe(goals[0])
    called = goal.label if len(set(goals)) == 1 else "objective"
    ends = [own["final"].get(name) for own, name in zip(figures, goals, strict=True)]
    yield replace(goal, label=f"final {called}"), ends, "final_split", ""
    best = [own["best"] for own in figures]
    yield replace(goal, label=f"best {called}"), best, "best_split", ""
    for name in dict.fromkeys(chain(*(own["final"] for own in figures))):
        if name not in goals and (metric := describe(name)).panel:
            values = [own["final"].get(name) for own in figures]
            yield replace(metric, label=f"final {metric.label}"), values, "final_split", ""


def until_target(own: Mapping[str, Any]) -> str:
    if not own["reached_target"]:
        return UNKNOWN if own["reached_target"] is None else "not reached"
    seconds = describe("time/train_seconds").text(own["seconds_to_target"])
    return f"{seconds} (step {own['steps_to_target']:,.0f})"


def written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(written, value)) or UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def show(comparison: Comparison) -> None:
    """Print the comparison for a person, to the terminal or into a file, which is wider."""
    for warning in warnings(comparison):
        CONSOLE.print(f"[yellow]not comparable[/yellow] {escape(warning)}")
    print_table(table_cells(comparison))
    for note in notes(comparison):
        CONSOLE.print(note, markup=False)


def print_table(cells: list[list[str]]) -> None:
    head, *rows = cells
    table = Table(show_header=True, header_style="bold")
    table.add_column(head[0], no_wrap=True)
    for name in head[1:]:
        table.add_column(Text(name), justify="right", overflow="fold", max_width=40)
    for row in rows:
        table.add_row(*map(Text, row))
    console = CONSOLE if CONSOLE.is_terminal else Console(width=max(CONSOLE.width, FILE_WIDTH))
    console.print(table)


def as_markdown(comparison: Comparison) -> str:
    lines = [f"> **not comparable** {warning}\n" for warning in warnings(comparison)]
    lines += markdown_table(table_cells(comparison))
    return "\n".join([*lines, *(f"\n{note}" for note in notes(comparison))])


def markdown_table(cells: list[list[str]]) -> list[str]:
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(row)} |" for row in rows]
