"""Compare runs: `python -m common.tools.compare RUN [RUN ...]`, the baseline first.

A run is the directory that a recipe wrote, a `wandb/offline-run-*` folder, or, with an account,
`entity/project` or `entity/project/run` at W&B.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from common.command_line import tool_parser
from common.console import CONSOLE
from common.files import json_safe
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.readers import read_runs
from common.tools.compare.table import as_markdown, notes, show


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tool_parser("common.tools.compare", __doc__)
    target = "of the objective: how long each run took to reach it (default: the worst of the best)"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="as above")
    parser.add_argument("--target", type=float, metavar="X", help=target)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs, as .png or .svg")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(arguments)
    comparison = compare(read_runs(given.runs), given.target)
    if given.json:
        print(json.dumps(json_safe(as_json(comparison)), indent=2))
    elif given.markdown:
        print(as_markdown(comparison))
    else:
        show(comparison)
    if given.plot is not None:
        from common.tools.compare.plot import plot_comparison

        plot_comparison(comparison, given.plot)
        if not given.json:
            CONSOLE.print(f"picture: {given.plot}", markup=False)


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the same for programs; the names of the figures are those of `figures_of`."""
    return {
        "baseline": comparison.runs[0].name,
        "target": comparison.target,
        "runs": [
            {"name": run.name, "source": run.source, "reason": run.reason}
            | comparison.figures[index]
            | {"differs": {name: each[index] for name, each in comparison.differences.items()}}
            for index, run in enumerate(comparison.runs)
        ],
        "unfair": comparison.unfair,
        "notes": notes(comparison),
    }


if __name__ == "__main__":
    main()
