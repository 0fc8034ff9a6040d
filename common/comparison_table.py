"""What a comparison says in words and figures: a table, warnings above it, notes below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.comparison import Comparison
from common.console import CONSOLE
from common.fairness import FAIR

# More runs than this stand one a row, fewer one a column.
MOST_COLUMNS = 5
UNKNOWN = "–"
FILE_WIDTH = 160  # characters of a line, where there is no terminal to fit into
LONGEST_PATH = 32  # characters of a path that are shown: its end tells more than its beginning


def warnings(comparison: Comparison) -> list[str]:
    """Return one sentence for each run that can't fairly be compared with the baseline."""
    baseline = comparison.runs[0].name
    sentences = []
    for run in comparison.runs[1:]:
        found = [unfair for unfair in comparison.unfair if unfair.run == run.name]
        if found:
            pairs = [f"{f.what} {shown(f.baseline_value)} and {shown(f.value)}" for f in found]
            sentences.append(f"{baseline} and {run.name}: {'; '.join(pairs)}")
    return sentences


def notes(comparison: Comparison) -> list[str]:
    """Return what must be known to read the table."""
    said = []
    for run, figures in zip(comparison.runs, comparison.figures, strict=True):
        if run.status != "finished":
            reason = f": {run.reason}" if run.reason else ""
            said.append(f"{run.name} is {figures['status']}{reason}")
        if not run.summary:
            said.append(f"{run.name}: throughput is the median of its log intervals so far")
    if comparison.target_accuracy is not None:
        if not comparison.target_is_given:
            said.append(
                f"accuracy {comparison.target_accuracy:.4f} is the lowest of the runs' best; "
                "choose another with --target-accuracy"
            )
        timeless = [
            run.name
            for run, figures in zip(comparison.runs, comparison.figures, strict=True)
            if figures["reached_target"] and figures["seconds_to_target"] is None
        ]
        if timeless:
            said.append(
                f"when {', '.join(timeless)} reached it isn't known, only at which step: "
                "time/train_seconds is not in the log"
            )
    return said


def table_cells(comparison: Comparison) -> list[list[str]]:
    """Return the table, its heading first: a column a run, or a row where there are many."""
    figures = comparison.figures
    names = [run.name for run in comparison.runs]
    names[0] += " (baseline)" if len(names) > 1 else ""
    rows = [["", *names], ["status", *(own["status"] for own in figures)]]
    for name, values in comparison.differences.items():
        cells = [shortened(shown(value)) for value in values]
        if len(set(cells)) > 1 or name in FAIR:
            rows.append([name, *cells])

    def add(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        cells = [cell(own) for own in figures]
        if set(cells) != {UNKNOWN}:
            rows.append([label, *cells])

    def add_number(label: str, name: str, form: str) -> None:
        add(label, lambda own: number(own[name], form))

    def add_accuracy(label: str, name: str, split: str) -> None:
        splits = {own[split] for own in figures if own[name] is not None}
        alone = f", {next(iter(splits))}" if len(splits) == 1 and None not in splits else ""
        add(
            f"{label}{alone}",
            lambda own: (
                number(own[name], ".4f")
                + (f" ({own[split]})" if own[name] is not None and own[split] and not alone else "")
            ),
        )

    first = figures[0]
    add(
        "throughput, samples/s",
        lambda own: number(own["samples_per_second"], ",.0f") + times(own, "throughput", first),
    )
    add_number("throughput, tokens/s", "tokens_per_second", ",.0f")
    add_number("MFU", "mfu", ".1%")
    add_number("goodput", "goodput", ".1%")
    kinds = {own["memory_kind"] for own in figures}
    add(
        "peak memory, MiB" + (f", {first['memory_kind']}" if len(kinds) == 1 else ""),
        lambda own: (
            number(own["peak_memory_mib"], ",.0f")
            + (f" {own['memory_kind']}" if len(kinds) > 1 and own["memory_kind"] else "")
            + times(own, "memory", first)
        ),
    )
    add_accuracy("final accuracy", "final_accuracy", "final_split")
    add_accuracy("best accuracy", "best_accuracy", "best_split")
    add_number("final F1", "final_f1", ".4f")
    add_number("final loss", "final_loss", ".4f")
    add("training time", lambda own: duration(own["train_seconds"]))
    add("total time", lambda own: duration(own["total_seconds"]))
    if comparison.target_accuracy is not None:
        add(f"time to accuracy {comparison.target_accuracy:.4f}", until_target)
    add_number("energy, J/sample", "joules_per_sample", ".3g")
    if len(names) > MOST_COLUMNS:
        return [list(column) for column in zip(*rows, strict=True)]
    return rows


def print_table(comparison: Comparison) -> None:
    """Print the table to the terminal, or into a file, which is wider."""
    head, *rows = table_cells(comparison)
    table = Table(show_header=True, header_style="bold")
    table.add_column(head[0], no_wrap=True)
    for name in head[1:]:
        table.add_column(Text(name), justify="right", overflow="fold", max_width=40)
    for row in rows:
        table.add_row(*map(Text, row))
    console = CONSOLE if CONSOLE.is_terminal else Console(width=max(CONSOLE.width, FILE_WIDTH))
    console.print(table)


def times(own: dict[str, Any], what: str, baseline: dict[str, Any]) -> str:
    """Return a figure's ratio to the baseline's, in brackets."""
    value = own[f"{what}_ratio"]
    return "" if value is None or own is baseline else f" ({value:.2f}×)"


def until_target(own: dict[str, Any]) -> str:
    """Return when a run first reached the target accuracy, or at which step."""
    if not own["reached_target"]:
        return UNKNOWN if own["reached_target"] is None else "not reached"
    step = f"step {own['steps_to_target']:,.0f}"
    seconds = own["seconds_to_target"]
    return step if seconds is None else f"{duration(seconds)} ({step})"


def number(value: float | None, form: str) -> str:
    """Return a number in a format, or the sign for what isn't known."""
    return UNKNOWN if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Return a time in the unit that a person would use."""
    if seconds is None:
        return UNKNOWN
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 10 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def shortened(text: str) -> str:
    """Leave out the beginning of a long path."""
    if "/" not in text or len(text) <= LONGEST_PATH:
        return text
    return f"…{text[-LONGEST_PATH:]}"


def shown(value: Any) -> str:
    """Return a flag's or a fact's value as a person would write it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value)) or UNKNOWN
    return f"{value:g}" if isinstance(value, float) else str(value)
