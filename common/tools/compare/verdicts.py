"""Verdicts on the differences between groups: better, worse, or not distinguishable."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from common.metric_names import THROUGHPUT
from common.system.wording import counted
from common.tools.compare import sentences
from common.tools.compare.comparison import Comparison
from common.tools.compare.groups import RunGroup
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.repetitions import (
    Values,
    finished_indices,
    sample_of_runs,
    values_of_seeds,
)
from common.tools.statistics.contrasts import Contrast, contrast_by_seeds, welch_contrast
from common.tools.statistics.samples import (
    MIN_RUNS,
    ConfidenceInterval,
    Sample,
    series_sample,
    simultaneous_confidence,
    welch_interval,
)
from common.track.names import metric_named

MIN_LOG_LINES = 3  # log lines that show how much the throughput of a single run varies
MAX_PAIRS_IN_TEXT = 10  # all pairs of five groups; a page and JSON have all pairs


@dataclass(frozen=True)
class SamplePair:
    """The values of one figure in a baseline and in another group."""

    baseline: Sample
    other: Sample

    @property
    def are_known(self) -> bool:
        """Whether each group has at least one value."""
        return self.baseline.mean is not None and self.other.mean is not None

    @property
    def are_repeated(self) -> bool:
        """Whether both groups have enough values to show how much they vary by chance."""
        return min(self.baseline.count, self.other.count) >= MIN_RUNS


@dataclass(frozen=True)
class GroupVerdict:
    """A group's difference in one figure from another group, the baseline of this pair.

    A difference of objectives is in the objective's own unit. A difference of throughputs is the
    logarithm of their ratio, so that ratios of 2 and of 1/2 are equally far from 1.
    """

    group: str
    baseline: str
    figure: str  # such as "final accuracy, test"
    text: str
    samples: SamplePair  # a value for each seed, or for each run for the throughput
    contrast: Contrast

    @property
    def difference(self) -> float:
        """The difference of the means."""
        assert self.samples.baseline.mean is not None
        assert self.samples.other.mean is not None
        return self.samples.other.mean - self.samples.baseline.mean

    @property
    def is_repeated(self) -> bool:
        """Whether both groups have several seeds, or runs for the throughput."""
        return self.samples.are_repeated

    @property
    def interval(self) -> ConfidenceInterval | None:
        """The interval of the difference; None if too few values are known, or none varies."""
        return self.contrast.interval

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether repeated runs tell the groups apart; None if too few runs were repeated."""
        if self.interval is None or not self.is_repeated:
            return None
        return self.interval.excludes_zero


@dataclass(frozen=True)
class GroupFigures:
    """The figures by which a group is judged."""

    group: RunGroup
    first_run: RunRecord  # the first finished run; the first run if none is finished
    run_count: int  # number of finished runs
    values_of_seeds: Mapping[str, float]  # the objective, by seed
    standard_error: float | None  # that of the first run's objective, from its number of samples
    log_throughput: Sample  # logarithms of the throughput, one for each run
    log_throughput_of_lines: Sample  # the same at the log lines of the first finished run

    @property
    def objective(self) -> Sample:
        """The mean and spread of the objective over the seeds."""
        return Sample.of([*self.values_of_seeds.values()])

    @property
    def is_repeated(self) -> bool:
        """Whether there are enough runs to show how much they vary by chance."""
        return self.run_count >= MIN_RUNS


def verdicts_of(comparison: Comparison, *, in_training: bool = False) -> list[GroupVerdict]:
    """Compare groups with each other in the objective and in the throughput.

    The pairs are those with the first group, in the groups' order, and then all other pairs of
    groups with repeated runs. All intervals of a figure hold together with 95 % confidence.

    Args:
        comparison: runs of one or more groups. With one group, there is nothing to compare.
        in_training: whether to judge by the best value in training's own evaluations, which are
            on validation data where there are any. Otherwise the final evaluation counts, which is
            on test data where there are any.
    """
    objectives = objective_values(comparison, in_training)
    standard_errors = [
        figures.best_standard_error if in_training else figures.final_standard_error
        for figures in comparison.figures
    ]
    groups = [
        figures_of_group(comparison, group, objectives, standard_errors)
        for group in comparison.groups
    ]
    pairs = pairs_to_judge(groups)
    repeated_pair_count = sum(
        baseline.is_repeated and other.is_repeated for baseline, other in pairs
    )
    confidence = simultaneous_confidence(repeated_pair_count)
    verdicts: list[GroupVerdict] = []
    for baseline, other in pairs:
        for verdict in (
            verdict_on_objective(baseline, other, confidence, in_training),
            verdict_on_throughput(baseline, other, confidence),
        ):
            if verdict is not None:
                verdicts.append(verdict)
    return verdicts


def figures_of_group(
    comparison: Comparison,
    group: RunGroup,
    objectives: Values,
    standard_errors: Values,
) -> GroupFigures:
    """Return the figures by which a group is judged.

    Args:
        objectives: the objective's values of all runs of the comparison.
        standard_errors: the standard errors of these values.
    """
    log_throughputs = [
        logarithm(run_figures.metrics[THROUGHPUT]) for run_figures in comparison.figures
    ]
    finished_run_indices = finished_indices(comparison, group)
    log_throughput_of_lines = Sample.of([])
    if finished_run_indices:
        log_throughput_of_lines = sample_of_log_lines(comparison.runs[finished_run_indices[0]])
    # The first finished run, whose standard error belongs to one of the values of the objective.
    first_index = (finished_run_indices or group.run_indices)[0]
    return GroupFigures(
        group=group,
        first_run=comparison.runs[first_index],
        run_count=len(finished_run_indices),
        values_of_seeds=values_of_seeds(comparison, group, objectives),
        standard_error=standard_errors[first_index],
        log_throughput=sample_of_runs(comparison, group, log_throughputs),
        log_throughput_of_lines=log_throughput_of_lines,
    )


def pairs_to_judge(groups: Sequence[GroupFigures]) -> list[tuple[GroupFigures, GroupFigures]]:
    """Return the pairs with the first group, then all other pairs of groups with repeated runs.

    Single runs are compared with the first group alone: none of their differences can be judged.
    """
    first = groups[0]
    pairs = []
    for baseline, other in combinations(groups, 2):
        if baseline is first or (baseline.is_repeated and other.is_repeated):
            pairs.append((baseline, other))
    return pairs


def verdict_on_objective(
    baseline: GroupFigures, other: GroupFigures, confidence: float, in_training: bool
) -> GroupVerdict | None:
    """Compare the objective of two groups; None if it is unknown, or if metric or split differ."""
    # `splits` has the split that training evaluates, and then that of the final evaluation.
    split_index = 0 if in_training else 1
    split = baseline.first_run.splits[split_index]
    objective = baseline.first_run.objective
    if other.first_run.objective != objective or other.first_run.splits[split_index] != split:
        return None
    samples = SamplePair(baseline.objective, other.objective)
    if not samples.are_known:
        return None
    contrast = contrast_by_seeds(baseline.values_of_seeds, other.values_of_seeds, confidence)
    if samples.are_repeated:
        text = sentences.difference_text(objective, samples.baseline, samples.other, contrast)
    else:
        errors = [baseline.standard_error, other.standard_error]
        text = sentences.difference_text_of_single_seeds(
            objective, samples.baseline, samples.other, errors
        )
    stage = "best" if in_training else "final"
    figure = f"{stage} {metric_named(objective.metric).label}, {split}"
    return GroupVerdict(
        group=other.group.label,
        baseline=baseline.group.label,
        figure=figure,
        text=text,
        samples=samples,
        contrast=contrast,
    )


def objective_values(comparison: Comparison, in_training: bool) -> Values:
    """Return the objective of each run, or None where it is unknown.

    Args:
        in_training: take the best value of the evaluations during training. Otherwise, take the
            value of the final evaluation.
    """
    if in_training:
        return [figures.best for figures in comparison.figures]
    return [
        figures.final.get(run.objective.metric)
        for run, figures in zip(comparison.runs, comparison.figures, strict=True)
    ]


def verdict_on_throughput(
    baseline: GroupFigures, other: GroupFigures, confidence: float
) -> GroupVerdict | None:
    """Compare the throughput of two groups; None if a group has no throughput.

    Single runs are compared by their log lines. These show how much the throughput varies within a
    run. It varies more between runs, so such an interval is too narrow.
    """
    samples = SamplePair(baseline.log_throughput, other.log_throughput)
    if not samples.are_known:
        return None
    if samples.are_repeated:
        contrast = welch_contrast(samples.baseline, samples.other, confidence)
        text = sentences.ratio_text(samples.baseline, samples.other, contrast)
    else:
        interval = welch_interval(
            baseline.log_throughput_of_lines, other.log_throughput_of_lines, confidence
        )
        contrast = Contrast(interval, runs_needed=None, is_paired=False)
        text = sentences.ratio_text_of_single_runs(samples.baseline, samples.other, interval)
    figure = metric_named(THROUGHPUT).label
    return GroupVerdict(
        group=other.group.label,
        baseline=baseline.group.label,
        figure=figure,
        text=text,
        samples=samples,
        contrast=contrast,
    )


def logarithm(rate: float | None) -> float | None:
    """Return the logarithm of a rate; None if the rate is unknown, infinite or not positive."""
    return math.log(rate) if rate is not None and 0 < rate < math.inf else None


def sample_of_log_lines(run: RunRecord) -> Sample:
    """Return the mean and spread of the logarithms of the throughput at a run's log lines.

    Lines that follow each other are alike, so `series_sample` counts them as fewer independent
    values. With fewer than `MIN_LOG_LINES` known values, the sample is empty.
    """
    logarithms = [logarithm(rate) for rate in run.values(THROUGHPUT)]
    known = [value for value in logarithms if value is not None]
    return series_sample(known if len(known) >= MIN_LOG_LINES else [])


def verdict_lines(
    verdicts: Sequence[GroupVerdict],
    most_pairs: int | None = MAX_PAIRS_IN_TEXT,
    source_of_all: str = "--json or --html",
) -> list[str]:
    """Return lines of text: a heading for each pair of groups, with its verdicts indented below.

    A pair can't be judged if one of its groups has a single run. If there are several such pairs,
    one sentence at the end stands for all of them.

    Args:
        most_pairs: how many pairs to show. A sentence counts the others. None shows all of them.
        source_of_all: where a user finds all pairs, for that sentence.
    """
    verdicts_by_pair: dict[tuple[str, str], list[GroupVerdict]] = {}
    for verdict in verdicts:
        verdicts_by_pair.setdefault((verdict.baseline, verdict.group), []).append(verdict)
    pairs_of_single_runs = {
        pair
        for pair, verdicts_of_pair in verdicts_by_pair.items()
        if not any(verdict.is_repeated for verdict in verdicts_of_pair)
    }
    left_out = pairs_of_single_runs if len(pairs_of_single_runs) > 1 else set()
    pairs = [pair for pair in verdicts_by_pair if pair not in left_out]
    shown_pairs = pairs[:most_pairs]
    lines: list[str] = []
    for baseline, group in shown_pairs:
        lines.append(f"{group} against {baseline}:")
        for verdict in verdicts_by_pair[baseline, group]:
            lines.append(f"  {verdict.figure}: {verdict.text}")
    further_pairs = [verdicts_by_pair[pair] for pair in pairs[len(shown_pairs) :]]
    if further_pairs:
        lines.append(further_pairs_text(further_pairs, source_of_all))
    if left_out:
        lines.append(single_runs_text(left_out))
    return lines


def single_runs_text(pairs: Collection[tuple[str, str]]) -> str:
    """Return the sentence that stands for pairs of a baseline and a group with a single run."""
    baselines = {baseline for baseline, _ in pairs}
    from_baseline = f" from {baselines.pop()}" if len(baselines) == 1 else ""
    return (
        f"{len(pairs)} differences{from_baseline} can't be judged, because a single run does not "
        "show what is chance: repeat these runs with several seeds"
    )


def further_pairs_text(further_pairs: Sequence[Sequence[GroupVerdict]], source_of_all: str) -> str:
    """Return a sentence on the pairs of groups that a text leaves out.

    Args:
        further_pairs: the verdicts of each of these pairs.
        source_of_all: where a user finds all pairs.
    """
    differing = [
        verdicts
        for verdicts in further_pairs
        if any(verdict.is_distinguishable for verdict in verdicts)
    ]
    pairs = counted(len(further_pairs), "further pair")
    count = len(differing) or "none"
    return f"and {pairs} of groups, of which {count} can be told apart: see {source_of_all}"


def correction_note(verdicts: Sequence[GroupVerdict]) -> str | None:
    """Return a sentence on the width of the intervals, if several pairs are compared.

    Only pairs of groups with several runs count. The result is None if there are fewer than two
    such pairs, or if none of their verdicts has an interval.
    """
    repeated = [verdict for verdict in verdicts if verdict.is_repeated]
    pair_count = len({(verdict.baseline, verdict.group) for verdict in repeated})
    intervals = [verdict.interval for verdict in repeated if verdict.interval is not None]
    if pair_count < 2 or not intervals:
        return None
    return (
        f"{pair_count} pairs of groups are compared. Each interval is widened to "
        f"{sentences.percent(intervals[0].confidence)} (Bonferroni), so that all intervals of a "
        "figure hold together in 95 % of such comparisons"
    )
