"""Show a comparison as text: warnings, tables of runs and of groups, verdicts and notes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.markup import escape

from common.console.messages import CONSOLE
from common.metric_names import MFU, OTHER_CPU, TRAINING_SECONDS
from common.output.tables import markdown_table, print_table
from common.system.printable import printable
from common.system.wording import listed
from common.tools.compare.comparison import Comparison
from common.tools.compare.figures import RunFigures
from common.tools.compare.group_table import group_cells, has_repetitions
from common.tools.compare.missing_values import MISSING_VALUES, missing_value_warnings
from common.tools.compare.rows import FigureRow, figure_rows
from common.tools.compare.setting_text import value_text
from common.tools.compare.verdicts import (
    MAX_PAIRS_IN_TEXT,
    correction_note,
    verdict_lines,
    verdicts_of,
)
from common.track.names import UNKNOWN, metric_named

MAX_COLUMNS = 5  # up to this many runs have a column each, more runs have a row each
# If other programs use at least this share of the machine's CPU time, they may slow a run down.
BUSY = 0.1
GROUPS_TITLE = "groups of runs that differ in the seed alone"
UNFAIR = "not a fair comparison"


def unfair_warnings(comparison: Comparison) -> list[str]:
    """Return sentences on the runs that can't fairly be compared with the baseline.

    Runs for which the sentence would be the same share one.
    """
    texts_by_run: dict[str, list[str]] = {}
    for difference in comparison.unfair_differences:
        baseline_text = value_text(difference.baseline_value)
        text = f"{difference.label} {baseline_text} and {value_text(difference.value)}"
        texts_by_run.setdefault(difference.run, []).append(text)
    runs_by_reason: dict[str, list[str]] = {}
    for run, texts in texts_by_run.items():
        runs_by_reason.setdefault("; ".join(texts), []).append(run)
    baseline = comparison.runs[0].name
    sentences = []
    for reason, runs in runs_by_reason.items():
        others = runs[0] if len(runs) == 1 else f"each of {listed(runs)}"
        sentences.append(f"{baseline} and {others}: {reason}")
    return sentences


def load_warnings(comparison: Comparison) -> list[str]:
    """Return one sentence if other programs may have slowed some runs down; otherwise nothing.

    A single run has no speeds to compare, so it gets no sentence.
    """
    if len(comparison.runs) < 2:
        return []
    loads: dict[str, float] = {}
    for run, figures in zip(comparison.runs, comparison.figures, strict=True):
        load = figures.metrics[OTHER_CPU]
        if load is not None:
            loads[run.name] = load
    busy_loads = {name: load for name, load in loads.items() if load >= BUSY}
    if not busy_loads:
        return []
    metric = metric_named(OTHER_CPU)
    shares = [f"{metric.text(load)} during {name}" for name, load in busy_loads.items()]
    quiet_loads = [load for load in loads.values() if load < BUSY]
    others = f", and at most {metric.text(max(quiet_loads))} during others" if quiet_loads else ""
    return [
        f"other programs used CPU time, so the throughputs are {UNFAIR}: {listed(shares)}{others}"
    ]


def notes(comparison: Comparison) -> list[str]:
    """Return sentences about confidence intervals, unfinished runs, MFUs, and the target."""
    lines = []
    correction = correction_note(verdicts_of(comparison))
    if correction is not None:
        lines.append(correction)
    for run, figures in zip(comparison.runs, comparison.figures, strict=True):
        if run.status != "finished":
            reason = f" ({run.reason})" if run.reason else ""
            lines.append(f"{run.name}: {figures.status}{reason}")
        if not run.summary:
            lines.append(f"{run.name}: throughput is the median of its log intervals so far")
        mfu = figures.metrics[MFU]
        if mfu is not None and mfu > 1 and run.saved_config.peak.source == "measured":
            lines.append(
                f"{run.name}: an MFU above 100% means that the device's peak was measured too low, "
                "for example because other programs used the cores at that time"
            )
    # The default target is the best value of the worst run, so that every run has reached it.
    if comparison.target is not None and not comparison.target_is_given:
        lines.append(
            f"the target, {target_text(comparison)}, is the worst of the runs' best values; "
            "recipes compare takes another with --target"
        )
    return lines


def target_text(comparison: Comparison) -> str:
    """Return the target with the label of its metric, such as ``accuracy 0.9000``."""
    metric = metric_named(comparison.runs[0].objective_key)
    return f"{metric.label} {metric.text(comparison.target)}"


def table_cells(comparison: Comparison) -> list[list[str]]:
    """Return the table as rows of cells, the heading first.

    Up to `MAX_COLUMNS` runs have a column each. More runs have a row each.
    """
    names = [run.name for run in comparison.runs]
    if len(names) > 1:
        names[0] += " (baseline)"
    rows = [["", *names], ["status", *(figures.status for figures in comparison.figures)]]
    for label, values in comparison.differences.items():
        cells = [value_text(value) for value in values]
        if len(set(cells)) > 1:  # values that look the same as text would show no difference
            rows.append([label, *cells])
    for row in figure_rows(comparison):
        if any(value is not None for value in row.values):
            rows.append(cells_of_figures(row, comparison))
        if row.is_final_objective and has_standard_error(comparison):
            rows.append(cells_of_standard_errors(comparison))
    if comparison.target is not None:
        target_cells = map(target_cell, comparison.figures)
        rows.append([f"time to {target_text(comparison)}", *target_cells])
    return arranged(rows)


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


def has_standard_error(comparison: Comparison) -> bool:
    """Return whether the standard error of any run's final objective is known."""
    return any(figures.final_standard_error is not None for figures in comparison.figures)


def cells_of_standard_errors(comparison: Comparison) -> list[str]:
    """Return the row of the final objective's standard errors from the number of samples.

    The heading states the number of samples. If the runs differ in it, each cell states its own. At
    least one standard error must be known: see `has_standard_error`.
    """
    metric = metric_named(comparison.runs[0].objective.metric)
    known_counts = set()
    for figures in comparison.figures:
        if figures.final_standard_error is not None:
            known_counts.add(figures.final_samples)
    cells = []
    for figures in comparison.figures:
        cell = metric.text(figures.final_standard_error)
        if figures.final_standard_error is not None and len(known_counts) > 1:
            cell += f" ({figures.final_samples:,.0f})"
        cells.append(cell)
    if len(known_counts) > 1:
        return ["  standard error (samples)", *cells]
    return [f"  standard error, {known_counts.pop():,.0f} samples", *cells]


def arranged(rows: list[list[str]]) -> list[list[str]]:
    """Return a table with a column for each run, transposed if it has too many columns."""
    is_wide = len(rows[0]) - 1 > MAX_COLUMNS
    return [list(cells) for cells in zip(*rows, strict=True)] if is_wide else rows


def target_cell(figures: RunFigures) -> str:
    """Return when a run reached the target, such as ``12.3 s (step 400)``, or ``not reached``."""
    if figures.reached_target is None:  # there is no target, or no evaluation
        return UNKNOWN
    if not figures.reached_target:
        return "not reached"
    seconds = metric_named(TRAINING_SECONDS).text(figures.seconds_to_target)
    return f"{seconds} (step {figures.steps_to_target:,.0f})"


class LabelledWarning(NamedTuple):
    """A reason not to trust a comparison."""

    label: str  # such as "busy machine"
    text: str


def labelled_warnings(comparison: Comparison, unfair_texts: Sequence[str]) -> list[LabelledWarning]:
    """Return all reasons not to trust a comparison, in the order of their weight.

    Args:
        unfair_texts: sentences on runs that can't fairly be compared, from `unfair_warnings`.
            `recipes vary` adds sentences on the runs within a group.
    """
    return [
        *(LabelledWarning(UNFAIR, text) for text in unfair_texts),
        *(LabelledWarning(MISSING_VALUES, text) for text in missing_value_warnings(comparison)),
        *(LabelledWarning("busy machine", text) for text in load_warnings(comparison)),
    ]


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
    tables = [TitledTable("", table_cells(comparison))]
    if has_repetitions(comparison):
        tables.append(TitledTable(GROUPS_TITLE, arranged(group_cells(comparison))))
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
