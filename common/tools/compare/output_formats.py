"""Writes a comparison in the chosen formats: text, Markdown or JSON, a picture, a web page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.console.messages import CONSOLE
from common.storage.json_files import json_safe
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.missing_values import missing_value_warnings
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.report import as_markdown, show
from common.tools.compare.verdicts import GroupVerdict, verdicts_of
from common.tools.compare.warnings_and_notes import load_warnings, notes


@dataclass(frozen=True)
class Options:
    """The command line of `recipes compare`."""

    runs: Sequence[str]
    target: float | None
    output_format: Literal["text", "markdown", "json"]
    plot: Path | None  # the file of a picture
    html: Path | None  # the file of a web page


def write_comparison(options: Options) -> None:
    """Compare runs, print the comparison, and write the picture and the page.

    Raises:
        UserError: a run can't be read, or a file can't be written.
    """
    require_paths(options)
    comparison = compare(read_runs(options.runs), options.target)
    if options.output_format == "json":
        print(json.dumps(json_safe(as_json(comparison)), indent=2))
    elif options.output_format == "markdown":
        print(as_markdown(comparison))
    else:
        show(comparison)
    # Programs read the output of --json, so it has nothing but the JSON.
    prints_paths = options.output_format != "json"
    if options.plot is not None:
        from common.tools.compare.plot import plot_comparison  # which imports matplotlib

        plot_comparison(comparison, options.plot)
        if prints_paths:
            CONSOLE.print(f"picture: {options.plot}", markup=False)
    if options.html is not None:
        from common.tools.compare.page import write_page

        write_page(comparison, options.html)
        if prints_paths:
            CONSOLE.print(f"page: {options.html}", markup=False)


def require_paths(options: Options) -> None:
    """Raise a `UserError` if the picture or the page can't be written.

    A comparison may take minutes, for example to read many runs from W&B.
    """
    if options.plot is not None:
        from common.tools.compare.plot import require_plot_path  # which imports matplotlib

        require_plot_path(options.plot)
    if options.html is not None:
        from common.tools.compare.page import require_page_path

        require_page_path(options.html)


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the object that ``--json`` prints; `RunFigures` explains the figures.

    A run's ``differs`` has its values of those settings that are not the same in all runs. Its
    ``reason`` says why it was preempted or failed. Runs of one group differ in the seed alone.

    There is a verdict for each figure and each pair of groups with repeated runs. A verdict's
    ``baseline`` is the group with which it compares ``group``. The ``baseline`` of the whole object
    is the first run.
    """
    runs = []
    for index, run in enumerate(comparison.runs):
        differs = {label: values[index] for label, values in comparison.differences.items()}
        entry = {"name": run.name, "source": run.source, "reason": run.reason}
        runs.append(entry | comparison.figures[index].to_json() | {"differs": differs})
    return {
        "baseline": comparison.runs[0].name,
        "target": comparison.target,
        "runs": runs,
        "unfair": [difference.to_json() for difference in comparison.unfair_differences],
        "busy": load_warnings(comparison),
        "missing_values": missing_value_warnings(comparison),
        "groups": [
            {
                "name": group.label,
                "runs": [comparison.runs[index].name for index in group.run_indices],
            }
            for group in comparison.groups
        ],
        "verdicts": [verdict_as_json(verdict) for verdict in verdicts_of(comparison)],
        "notes": notes(comparison),
    }


def verdict_as_json(verdict: GroupVerdict) -> dict[str, object]:
    """Return a verdict with its interval, as ``--json`` prints it.

    For the throughput, the difference and the ends of the interval are logarithms of ratios.
    """
    interval = verdict.interval
    return {
        "group": verdict.group,
        "baseline": verdict.baseline,
        "figure": verdict.figure,
        "text": verdict.text,
        "count": verdict.samples.other.count,
        "baseline_count": verdict.samples.baseline.count,
        "difference": verdict.difference,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "confidence": None if interval is None else interval.confidence,
        "distinguishable": verdict.is_distinguishable,
        "paired": verdict.contrast.is_paired,
        "runs_needed": verdict.contrast.runs_needed,
    }
