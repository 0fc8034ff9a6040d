"""Compare runs with the first of them, the baseline: speed, memory, energy, quality, settings.

Runs that differ in the seed alone are one group. Each group is compared with the first one, with an
interval where both have several seeds.

A RUN is one of these:
  a directory that a recipe wrote, such as runs/first
  a wandb/offline-run-* folder
  entity/project or entity/project/run at W&B, which needs an account
"""

import json
from collections.abc import Sequence
from pathlib import Path

from common.console import CONSOLE
from common.files import json_safe
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.readers import read_runs
from common.tools.compare.table import as_markdown, load_warnings, notes, show
from common.tools.compare.verdicts import Verdict, judge
from common.tools.parser import tool_parser


def main(words: Sequence[str] | None = None) -> None:
    """Print the comparison that the command line asks for, and draw it with ``--plot``."""
    parser = tool_parser("compare", __doc__, "%(prog)s RUN [RUN ...] [options]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the baseline first")
    parser.add_argument(
        "--target",
        type=float,
        metavar="X",
        help="value of the objective; shows how long each run took to reach it "
        "(default: the worst of the runs' best values)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs as .png or .svg")
    output_format = parser.add_mutually_exclusive_group()
    output_format.add_argument("--markdown", action="store_true", help="print a Markdown table")
    output_format.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args(words)
    comparison = compare(read_runs(arguments.runs), arguments.target)
    if arguments.json:
        print(json.dumps(json_safe(as_json(comparison)), indent=2))
    elif arguments.markdown:
        print(as_markdown(comparison))
    else:
        show(comparison)
    if arguments.plot is not None:
        from common.tools.compare.plot import plot_comparison

        plot_comparison(comparison, arguments.plot)
        if not arguments.json:  # programs read that output, so it has nothing but the JSON
            CONSOLE.print(f"picture: {arguments.plot}", markup=False)


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the object that ``--json`` prints; `figures_of` explains the names of the figures.

    Each run has its own values of the settings in which any of the runs differ (``differs``).
    Runs of one group differ in the seed alone. A verdict is on a group's difference from the first.
    """
    runs = []
    for index, run in enumerate(comparison.runs):
        differs = {label: values[index] for label, values in comparison.differences.items()}
        entry = {"name": run.name, "source": run.source, "reason": run.reason}
        runs.append(entry | comparison.figures[index] | {"differs": differs})
    return {
        "baseline": comparison.runs[0].name,
        "target": comparison.target,
        "runs": runs,
        "unfair": comparison.unfair,
        "busy": load_warnings(comparison),
        "groups": [
            {"name": group.label, "runs": [comparison.runs[place].name for place in group.places]}
            for group in comparison.groups
        ],
        "verdicts": [verdict_as_json(verdict) for verdict in judge(comparison)],
        "notes": notes(comparison),
    }


def verdict_as_json(verdict: Verdict) -> dict[str, object]:
    """Return a verdict with its interval; a throughput's numbers are logarithms of ratios."""
    interval = verdict.interval
    return {
        "group": verdict.group,
        "baseline": verdict.baseline,
        "figure": verdict.figure,
        "text": verdict.text,
        "count": verdict.count,
        "baseline_count": verdict.baseline_count,
        "difference": verdict.difference,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "confidence": None if interval is None else interval.confidence,
        "distinguishable": verdict.is_distinguishable,
        "runs_needed": verdict.runs_needed,
    }
