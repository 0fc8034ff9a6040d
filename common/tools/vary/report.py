"""Report on variants: a table of means over seeds, a picture, and a note in the model cards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from common.console import say
from common.errors import UserError
from common.files import write_text
from common.system.platforms import shown_path
from common.tables import markdown_table, print_table
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.readers import read_runs
from common.tools.compare.table import (
    FigureRow,
    arranged,
    figure_rows,
    warnings,
)

# Headings the part of a model card that `add_to_cards` writes.
CARD_HEADING = "\n## The same with other seeds\n"


def report(directory: Path, finished: Mapping[str, Sequence[str]]) -> None:
    """Show means over seeds, their standard deviations, and ratios to the first variant.

    Args:
        directory: receives `table.md` and `picture.png`.
        finished: directories of the finished runs, by variant and in the order of their seeds.
            Variants with fewer finished runs than others are left out, so that all means are over
            the same number of seeds.

    Raises:
        UserError: there is no finished run.
    """
    from common.tools.compare.plot import plot_comparison

    seed_count = max(map(len, finished.values()), default=0)
    complete = {name: runs for name, runs in finished.items() if len(runs) == seed_count}
    if not complete:
        raise UserError(
            "no variant finished, so there is nothing to compare",
            advice="correct what made the runs fail (see above), and repeat the command",
        )
    # One comparison for each seed, of all variants.
    comparisons = [compare(read_runs(runs)) for runs in zip(*complete.values(), strict=True)]
    corner = "" if seed_count == 1 else f"mean ± deviation of {seed_count} seeds"
    rows = [[corner, *complete], *rows_of_means(comparisons)]
    # Variants differ in the same settings with every seed, so the first seed's warnings are enough.
    for warning in warnings(comparisons[0]):
        say(f"not a fair comparison: {warning}")
    print_table(arranged(rows))
    write_text(directory / "table.md", "\n".join(markdown_table(arranged(rows))) + "\n")
    if seed_count > 1:
        for column, runs in enumerate(complete.values(), start=1):  # column 0 has the headings
            # Cut off the ratio to the first variant: it says nothing in a card of one model.
            cells = [[row[0], row[column].partition(" (")[0]] for row in rows]
            add_to_cards(runs, "\n".join(markdown_table(cells)))
    # The picture shows the runs of the first seed; those of all seeds would hide each other.
    plot_comparison(comparisons[0], directory / "picture.png")
    say(f"table: {shown_path(directory / 'table.md')}, with picture.png beside it")


def rows_of_means(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a row for each metric that any run has: its heading, and a cell for each variant.

    Args:
        comparisons: one for each seed, of the same variants in the same order.
    """
    rows = []
    for rows_of_seeds in zip(*map(figure_rows, comparisons), strict=True):
        metric = rows_of_seeds[0].metric
        cells = cells_of_means(rows_of_seeds)
        if any(cell != metric.text(None) for cell in cells):  # some variant has this metric
            rows.append([metric.heading, *cells])
    return rows


def cells_of_means(rows_of_seeds: Sequence[FigureRow]) -> list[str]:
    """Return each variant's mean of one metric over seeds, with deviation and ratio.

    Args:
        rows_of_seeds: the metric's row in the comparison of each seed.
    """
    metric = rows_of_seeds[0].metric
    # A comparison of runs has ratios for speed and memory. Means have one for energy as well.
    has_ratio = bool(rows_of_seeds[0].ratio_name) or metric.panel == "Energy"
    cells: list[str] = []
    baseline: float | None = None
    for values_of_seeds in zip(*(row.values for row in rows_of_seeds), strict=True):
        known = [value for value in values_of_seeds if value is not None]
        average = mean(known) if known else None
        spread = f" ± {metric.text(stdev(known))}" if len(known) > 1 else ""
        ratio = ""
        if not cells:  # the first variant
            baseline = average
        elif has_ratio and average and baseline:
            ratio = f" ({average / baseline:.2f}×)"
        cells.append(metric.text(average) + spread + ratio)
    return cells


def add_to_cards(runs: Sequence[str], table: str) -> None:
    """Write into the model cards of one variant's runs how much the figures vary with the seed.

    The table replaces the one of an earlier report.
    """
    for run in runs:
        card = Path(run, "model", "README.md")
        if card.exists():
            text, _, _ = card.read_text(encoding="utf-8").partition(CARD_HEADING)
            write_text(card, f"{text}{CARD_HEADING}\n{table}\n")
