"""A comparison as text, for the terminal, Markdown and the web page."""

from dataclasses import dataclass
from typing import NamedTuple

from rich.markup import escape

from common.console.messages import CONSOLE
from common.output.tables import markdown_table, print_table
from common.system.printable import printable
from common.tools.compare.comparison import Comparison
from common.tools.compare.group_table import group_cells, has_repetitions
from common.tools.compare.run_table import run_cells, transposed_if_wide
from common.tools.compare.verdict_lines import MAX_PAIRS_IN_TEXT, verdict_lines
from common.tools.compare.verdicts import verdicts_of
from common.tools.compare.warnings_and_notes import (
    LabelledWarning,
    labelled_warnings,
    notes,
    unfair_warnings,
)

GROUPS_TITLE = "groups of runs that differ in the seed alone"


class TitledTable(NamedTuple):
    """A table, and the title above it."""

    title: str  # empty for the table of runs
    rows: list[list[str]]  # the row of headings first


@dataclass(frozen=True)
class Report:
    """All text of a comparison, in the order in which it is shown.

    The terminal, Markdown and the web page each show these texts in their own form. Each form makes
    the texts safe to show, because names and notes of runs may have any characters.
    """

    warnings: list[LabelledWarning]
    tables: list[TitledTable]
    lines: list[str]  # verdicts, indented below a heading for each pair of groups; then notes


def report_of(comparison: Comparison, most_pairs: int | None = MAX_PAIRS_IN_TEXT) -> Report:
    """Return the text of a comparison: warnings, tables of runs and groups, verdicts and notes.

    Args:
        most_pairs: how many pairs of groups to show verdicts on; None for all of them.
    """
    all_warnings = labelled_warnings(comparison, unfair_warnings(comparison))
    tables = [TitledTable("", run_cells(comparison))]
    if has_repetitions(comparison):
        tables.append(TitledTable(GROUPS_TITLE, transposed_if_wide(group_cells(comparison))))
    lines = [*verdict_lines(verdicts_of(comparison), most_pairs), *notes(comparison)]
    return Report(all_warnings, tables, lines)


def show(comparison: Comparison) -> None:
    """Print the comparison: warnings first, then tables of runs and groups, verdicts and notes."""
    report = report_of(comparison)
    for warning in report.warnings:
        CONSOLE.print(f"[yellow]{warning.label}:[/yellow] {escape(printable(warning.text))}")
    for table in report.tables:
        print_table(table.rows, title=table.title)
    for line in report.lines:
        CONSOLE.print(printable(line), markup=False)


def as_markdown(comparison: Comparison) -> str:
    """Return the text that `show` prints, in Markdown."""
    report = report_of(comparison)
    lines = [f"> **{label}** {printable(text)}\n" for label, text in report.warnings]
    for table in report.tables:
        if table.title:
            lines.append(f"\n{table.title}:\n")
        lines += markdown_table(table.rows)
    lines += [f"\n{printable(line.strip())}" for line in report.lines]
    return "\n".join(lines)
