"""Compare runs: `python -m common.compare RUN [RUN ...]`, the baseline first.

A run is the directory that a recipe wrote, a `wandb/offline-run-*` folder, or, with an account,
`entity/project` or `entity/project/run` at W&B. The last could not be tried without an account:
it is written against wandb's public API, and tested with a stand-in for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from common.comparison import Comparison, compare
from common.comparison_table import notes, print_table, table_cells, warnings
from common.console import CONSOLE
from common.errors import UserError
from common.run_reader import read_runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the runs that the command line names.

    Raises:
        UserError: for what is no run, a target that is no accuracy, or a picture that can't be
            written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m common.compare",
        description="Set runs side by side, the baseline first, and name what is not comparable.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's directory, a wandb/offline-run-* folder, or entity/project at W&B",
    )
    parser.add_argument(
        "--target-accuracy",
        type=float,
        metavar="X",
        help="tell how long each run took to reach it "
        "(default: the lowest of the runs' best accuracies)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs, as .png or .svg")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(arguments)
    if given.target_accuracy is not None and not 0 <= given.target_accuracy <= 1:
        raise UserError(f"--target-accuracy {given.target_accuracy} can't work: give 0 to 1")
    comparison = compare(read_runs(given.runs), given.target_accuracy)
    if given.json:
        print(json.dumps(as_json(comparison), indent=2))
    elif given.markdown:
        print(as_markdown(comparison))
    else:
        show(comparison)
    if given.plot is not None:
        from common.comparison_plot import plot_comparison

        plot_comparison(comparison, given.plot)
        if not given.json:
            CONSOLE.print(f"picture: {given.plot}", markup=False)


def show(comparison: Comparison) -> None:
    """Print the comparison for a person: warnings, table, notes."""
    for warning in warnings(comparison):
        CONSOLE.print(f"[yellow]not comparable[/yellow] {escape(warning)}")
    print_table(comparison)
    for note in notes(comparison):
        CONSOLE.print(note, markup=False)


def as_markdown(comparison: Comparison) -> str:
    """Return the same as a Markdown table, with warnings above it and notes below."""
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in table_cells(comparison)]
    lines = [f"> **not comparable** {warning}\n" for warning in warnings(comparison)]
    lines += ["| " + " | ".join(row) + " |" for row in (head, ["---", *["---:"] * (len(head) - 1)])]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, *(f"\n{note}" for note in notes(comparison))])


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the same for programs; the names of the figures are those of `figures_of`."""
    return {
        "baseline": comparison.runs[0].name,
        "target_accuracy": comparison.target_accuracy,
        "runs": [
            {
                "name": run.name,
                "source": run.source,
                "reason": run.reason,
                **figures,
                "differs": {name: v[index] for name, v in comparison.differences.items()},
            }
            for index, (run, figures) in enumerate(
                zip(comparison.runs, comparison.figures, strict=True)
            )
        ],
        "unfair": [asdict(found) for found in comparison.unfair],
        "notes": notes(comparison),
    }


if __name__ == "__main__":
    main()
