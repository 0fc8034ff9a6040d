"""What the runs say about a difference between groups: better, worse, or not distinguishable."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.tools.compare import sentences
from common.tools.compare.comparison import Comparison
from common.tools.compare.groups import RunGroup
from common.tools.compare.readers import RunRecord
from common.tools.compare.repetitions import (
    Values,
    counted_places,
    sample_of_runs,
    sample_of_seeds,
)
from common.tools.statistics.samples import (
    FEWEST_RUNS,
    Interval,
    Sample,
    runs_needed,
    simultaneous_confidence,
    welch_interval,
)
from common.track.names import THROUGHPUT, describe

FEWEST_LOG_LINES = 3  # of a single run, to show how much its throughput varies


@dataclass(frozen=True)
class Verdict:
    """A group's difference from the baseline in one figure.

    The difference of an objective is in its own unit. That of the throughput is the logarithm of
    the ratio, so that a ratio of 2 and one of 1/2 are equally far from 1.
    """

    group: str
    baseline: str
    figure: str  # such as "final accuracy, test"
    text: str
    count: int  # of the group's seeds, or of its runs for the throughput
    baseline_count: int
    difference: float
    interval: Interval | None  # None if there is too little to go by
    runs_needed: int | None  # per group, for a difference as large as this one
    is_repeated: bool  # whether both groups have several seeds, or runs for the throughput

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether repeated runs tell the groups apart; None if too few runs were repeated."""
        if self.interval is None or not self.is_repeated:
            return None
        return self.interval.excludes_zero


def judge(comparison: Comparison, *, by_validation: bool = False) -> list[Verdict]:
    """Compare each group with the first in the objective and in the throughput.

    With several groups of repeated runs, all intervals of a figure hold together with 95 %
    confidence.

    Args:
        comparison: runs of one or more groups. With one group, there is nothing to compare.
        by_validation: whether to judge by the best value in training's own evaluations, which are
            on validation data where there are any. Otherwise the final evaluation counts, which is
            on test data where there are any.
    """
    baseline, *others = comparison.groups
    repeated = [group for group in others if len(counted_places(comparison, group)) >= FEWEST_RUNS]
    confidence = simultaneous_confidence(len(repeated))
    judged: list[Verdict] = []
    for group in others:
        for verdict in (
            judge_objective(comparison, baseline, group, confidence, by_validation),
            judge_throughput(comparison, baseline, group, confidence),
        ):
            if verdict is not None:
                judged.append(verdict)
    return judged


def judge_objective(
    comparison: Comparison,
    baseline: RunGroup,
    group: RunGroup,
    confidence: float,
    by_validation: bool,
) -> Verdict | None:
    """Compare the objective of two groups; None if it is not the same figure, or is unknown."""
    first_run = comparison.runs[baseline.places[0]]
    second_run = comparison.runs[group.places[0]]
    split_place = 0 if by_validation else 1
    split = first_run.splits[split_place]
    objective = first_run.objective
    if second_run.objective != objective or second_run.splits[split_place] != split:
        return None
    values = objective_values(comparison, by_validation)
    first = sample_of_seeds(comparison, baseline, values)
    second = sample_of_seeds(comparison, group, values)
    if first.mean is None or second.mean is None:
        return None
    interval = welch_interval(first, second, confidence)
    needed = runs_needed(first, second, confidence)
    if are_repeated(first, second):
        text = sentences.difference(objective, first, second, interval, needed)
    else:
        errors = standard_errors(comparison, (baseline, group), by_validation)
        text = sentences.difference_of_single_seeds(objective, first, second, errors)
    stage = "best" if by_validation else "final"
    figure = f"{stage} {describe(objective.metric).label}, {split}"
    return make_verdict(baseline, group, figure, text, first, second, interval, needed)


def standard_errors(
    comparison: Comparison, groups: Sequence[RunGroup], by_validation: bool
) -> list[float | None]:
    """Return the standard error of the objective of each group's first run; None if unknown."""
    name = "best_standard_error" if by_validation else "final_standard_error"
    return [comparison.figures[group.places[0]][name] for group in groups]


def objective_values(comparison: Comparison, by_validation: bool) -> Values:
    """Return each run's best objective in training's evaluations, or its final one."""
    if by_validation:
        return [figures["best"] for figures in comparison.figures]
    return [
        figures["final"].get(run.objective.metric)
        for run, figures in zip(comparison.runs, comparison.figures, strict=True)
    ]


def judge_throughput(
    comparison: Comparison, baseline: RunGroup, group: RunGroup, confidence: float
) -> Verdict | None:
    """Compare the throughput of two groups; None if one has none.

    Single runs are compared by their log lines. These show how much the throughput varies within a
    run, which is less than it varies between runs.
    """
    logarithms = [logarithm(figures[THROUGHPUT]) for figures in comparison.figures]
    first = sample_of_runs(comparison, baseline, logarithms)
    second = sample_of_runs(comparison, group, logarithms)
    if first.mean is None or second.mean is None:
        return None
    needed = None
    if are_repeated(first, second):
        interval = welch_interval(first, second, confidence)
        needed = runs_needed(first, second, confidence)
        text = sentences.ratio(first, second, interval, needed)
    else:
        baseline_lines = log_lines(first_counted_run(comparison, baseline))
        group_lines = log_lines(first_counted_run(comparison, group))
        interval = welch_interval(baseline_lines, group_lines, confidence)
        text = sentences.ratio_of_single_runs(first, second, interval)
    figure = describe(THROUGHPUT).label
    return make_verdict(baseline, group, figure, text, first, second, interval, needed)


def are_repeated(first: Sample, second: Sample) -> bool:
    """Return whether both samples have enough values to show how much they vary by chance."""
    return min(first.count, second.count) >= FEWEST_RUNS


def make_verdict(
    baseline: RunGroup,
    group: RunGroup,
    figure: str,
    text: str,
    first: Sample,
    second: Sample,
    interval: Interval | None,
    needed: int | None,
) -> Verdict:
    """Return the verdict on one figure of two groups.

    Args:
        first: the baseline's values, at least one.
        second: the group's values, at least one.
        interval: of the difference; None if there is too little to go by.
        needed: the runs per group that could tell such a difference; see `runs_needed`.
    """
    assert first.mean is not None
    assert second.mean is not None
    return Verdict(
        group=group.label,
        baseline=baseline.label,
        figure=figure,
        text=text,
        count=second.count,
        baseline_count=first.count,
        difference=second.mean - first.mean,
        interval=interval,
        runs_needed=needed,
        is_repeated=are_repeated(first, second),
    )


def logarithm(rate: float | None) -> float | None:
    """Return the logarithm of a rate; None if it is unknown or not positive."""
    return math.log(rate) if rate is not None and 0 < rate < math.inf else None


def first_counted_run(comparison: Comparison, group: RunGroup) -> RunRecord:
    """Return the first run of a group that finished; there must be one."""
    return comparison.runs[counted_places(comparison, group)[0]]


def log_lines(run: RunRecord) -> Sample:
    """Describe the logarithms of the throughput at a run's log lines, if there are enough."""
    logarithms = [logarithm(rate) for rate in run.values(THROUGHPUT)]
    known = [value for value in logarithms if value is not None]
    return Sample.of(known if len(known) >= FEWEST_LOG_LINES else [])


def verdict_lines(judged: Sequence[Verdict]) -> list[str]:
    """Return lines of text: a heading for each group, and its verdicts below it, indented.

    If several groups can't be judged, because they ran once, one sentence stands for all of them.
    """
    single_groups = {verdict.group for verdict in judged if not verdict.is_repeated}
    repeated_groups = {verdict.group for verdict in judged if verdict.is_repeated}
    left_out = single_groups - repeated_groups if len(single_groups) > 1 else set()
    lines: list[str] = []
    group = None
    for verdict in judged:
        if verdict.group in left_out:
            continue
        if verdict.group != group:
            group = verdict.group
            lines.append(f"{verdict.group} against {verdict.baseline}:")
        lines.append(f"  {verdict.figure}: {verdict.text}")
    if left_out:
        lines.append(
            f"{len(left_out)} differences from {judged[0].baseline} can't be judged, because a "
            "single run does not show what is chance: repeat these runs with several seeds"
        )
    return lines


def correction_note(judged: Sequence[Verdict]) -> str | None:
    """Return a sentence on the width of the intervals, if several groups are compared."""
    repeated = [verdict for verdict in judged if verdict.is_repeated]
    group_count = len({verdict.group for verdict in repeated})
    intervals = [verdict.interval for verdict in repeated if verdict.interval is not None]
    if group_count < 2 or not intervals:
        return None
    return (
        f"{group_count} groups are compared with the first. Each interval is widened to "
        f"{sentences.percent(intervals[0].confidence)} (Bonferroni), so that all intervals of a "
        "figure hold together in 95 % of such comparisons"
    )
