"""The table of results, as text and Markdown: who met which goal, when, and with how much work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.accuracy.goals import Goal
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.workloads import WORKLOADS, Published, Recipe, Workload
from benchmarks.harness.text_tables import aligned_table, markdown_table

COMPUTED = "*"
COMPUTED_IN_MARKDOWN = "\\*"  # a bare asterisk would begin italics
AT_MOST = "≤"
LEGEND = (
    f"{COMPUTED} computed: the speed measured here, times the epochs of a published or a faster "
    "run, whose best accuracy this is",
    f"{AT_MOST} the published accuracy is that of the last epoch; an earlier one may have been "
    "enough",
)
PACKAGES_TO_NAME = ("torch", "accelerate", "transformers")
HEADINGS = ("goal", "contestant", "time", "PFLOP", "met", "best")


@dataclass(frozen=True)
class Row:
    """When and with how much work one contestant met one goal, over its seeds."""

    goal: str
    contestant: str
    is_recipe: bool
    seeds: list[int]
    seconds: list[float]  # of the seeds that met the goal
    petaflop: list[float]  # of the same seeds
    epochs: list[float]  # of the same seeds
    best: list[float]  # of all seeds: the best value of the goal's first figure
    is_computed: bool = False
    is_bound: bool = False  # whether the time is an upper bound

    def to_json(self) -> dict[str, Any]:
        """Return the row with means and deviations."""
        return {
            **asdict(self),
            "seconds_mean": mean_of(self.seconds),
            "seconds_deviation": deviation_of(self.seconds),
            "petaflop_mean": mean_of(self.petaflop),
            "best_mean": mean_of(self.best),
        }

    def cells(self) -> tuple[str, ...]:
        """Return the row's cells for people, in the order of `HEADINGS`."""
        is_trained_here = bool(self.seeds) and not self.is_computed
        met = f"{len(self.seconds)}/{len(self.seeds)}" if is_trained_here else "–"
        mark = f" {COMPUTED}" if self.is_computed else ""
        bound = f"{AT_MOST} " if self.is_bound and self.seconds else ""
        if self.seconds:
            time = f"{bound}{mean_duration(self.seconds)}{mark}"
        else:
            time = f"not met{mark}" if self.seeds else "not run here"
        petaflop = mean_of(self.petaflop)
        best = mean_of(self.best)
        return (
            self.goal,
            self.contestant,
            time,
            "–" if petaflop is None else f"{petaflop:.2g}",
            met,
            "–" if best is None else f"{best:.2%}{mark}",
        )


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return mean(values) if values else None


def deviation_of(values: Sequence[float]) -> float | None:
    """Return the standard deviation; None of fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def mean_duration(seconds: Sequence[float]) -> str:
    """Return the mean of some times and their deviation, in s, min or h."""
    average = mean(seconds)
    if average >= 2 * 3600:
        unit = "h"
        divisor = 3600.0
    elif average >= 120:
        unit = "min"
        divisor = 60.0
    else:
        unit = "s"
        divisor = 1.0
    deviation = deviation_of(seconds)
    spread = "" if deviation is None else f" ± {deviation / divisor:.1f}"
    return f"{average / divisor:.1f}{spread} {unit}"


def rows_of(results: Results) -> list[Row]:
    """Return the rows of all goals whose data set has runs."""
    rows: list[Row] = []
    for workload in WORKLOADS.values():
        if any(run.workload == workload.name for run in results.runs.values()):
            for goal in workload.goals:
                rows += rows_of_goal(results, workload, goal)
    return rows


def rows_of_goal(results: Results, workload: Workload, goal: Goal) -> Iterator[Row]:
    """Yield the row of each contestant that has a run, then records that are only published."""
    for contestant in workload.contestants:
        runs = results.of(workload.name, contestant.name)
        evaluations = [(run, results.evaluations(workload, run)) for run in runs]
        # The others say nothing about this goal: a trial while the run whose epochs it takes is
        # missing, or a record without this figure.
        known = [(run, entries) for run, entries in evaluations if goal.best(entries) is not None]
        if not known:
            continue
        met = [(run, goal.first_met(entries)) for run, entries in known]
        met_entries = [(run, entry) for run, entry in met if entry is not None]
        bests = [goal.best(entries) for _, entries in known]
        yield Row(
            goal=goal.title,
            contestant=contestant.name,
            is_recipe=isinstance(contestant, Recipe),
            seeds=[run.seed for run, _ in known],
            seconds=[round(entry.seconds, 2) for _, entry in met_entries],
            petaflop=[run.forward.training_petaflop(entry) for run, entry in met_entries],
            epochs=[entry.epoch for _, entry in met_entries],
            best=[best for best in bests if best is not None],
            is_computed=any(run.trial is not None for run, _ in known),
            is_bound=isinstance(getattr(contestant, "epochs_from", None), Published),
        )
    for record in workload.only_published:
        if record.goal == goal.title:
            yield Row(
                goal=goal.title,
                contestant=record.name,
                is_recipe=False,
                seeds=[],
                seconds=[],
                petaflop=[record.petaflop],
                epochs=[],
                best=[],
            )


def caption(results: Results) -> str:
    """Return the hardware, the versions and the commits of all runs, for people."""
    machine = results.machine
    versions = [f"{name} {machine['versions'][name]}" for name in PACKAGES_TO_NAME]
    commits = {(run.git_commit or "unknown")[:7]: None for run in results.runs.values()}
    seeds = sorted({run.seed for run in results.runs.values()})
    parts = [
        machine["hardware"]["processor"],
        *versions,
        f"seeds {', '.join(map(str, seeds))}",
        f"commit {', '.join(commits)}",
    ]
    return "; ".join(parts)


def table_of(results: Results) -> list[dict[str, Any]]:
    """Return the rows for the file of results."""
    return [row.to_json() for row in rows_of(results)]


def as_text(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    table = aligned_table([HEADINGS, *without_repetitions(rows)], names=2)
    return "\n".join([table, *legend_for(rows)])


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown, the recipes in bold."""
    table: list[Sequence[str]] = [HEADINGS]
    for row, cells in zip(rows, without_repetitions(rows), strict=True):
        goal, *others = [cell.replace(COMPUTED, COMPUTED_IN_MARKDOWN) for cell in cells]
        if row.is_recipe:
            others = [f"**{cell}**" for cell in others]
        table.append([goal, *others])
    legend = ["\n" + line.replace(COMPUTED, COMPUTED_IN_MARKDOWN) for line in legend_for(rows)]
    return "\n".join([*markdown_table(table, "llrrrr"), *legend])


def without_repetitions(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of all rows; a goal's title stands in its first row only."""
    cells = []
    goal = ""
    for row in rows:
        title, *others = row.cells()
        cells.append(("" if title == goal else title, *others))
        goal = title
    return cells


def legend_for(rows: Sequence[Row]) -> list[str]:
    """Return the explanations of those marks that the rows have."""
    computed, bound = LEGEND
    legend = [computed] if any(row.is_computed for row in rows) else []
    if any(row.is_bound for row in rows):
        legend.append(bound)
    return legend
