"""Verdicts on the differences between groups: better, worse, or not distinguishable."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from common.metric_names import THROUGHPUT
from common.tools.compare import objective_text, throughput_text
from common.tools.compare.comparison import Comparison
from common.tools.compare.group_figures import GroupFigures, figures_of_groups
from common.tools.statistics.contrasts import Contrast, contrast_by_seeds, welch_contrast
from common.tools.statistics.samples import (
    MIN_RUNS,
    ConfidenceInterval,
    Sample,
    simultaneous_confidence,
    welch_interval,
)
from common.track.names import metric_named


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
    pairs = pairs_to_judge(figures_of_groups(comparison, in_training=in_training))
    repeated_pair_count = sum(
        baseline.is_repeated and other.is_repeated for baseline, other in pairs
    )
    confidence = simultaneous_confidence(repeated_pair_count)
    verdicts: list[GroupVerdict] = []
    for baseline, other in pairs:
        on_objective = verdict_on_objective(baseline, other, confidence, in_training)
        on_throughput = verdict_on_throughput(baseline, other, confidence)
        for verdict in (on_objective, on_throughput):
            if verdict is not None:
                verdicts.append(verdict)
    return verdicts


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
        text = objective_text.difference_text(objective, samples.baseline, samples.other, contrast)
    else:
        text = objective_text.difference_text_of_single_seeds(
            objective,
            samples.baseline,
            samples.other,
            baseline.standard_error,
            other.standard_error,
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
        text = throughput_text.ratio_text(samples.baseline, samples.other, contrast)
    else:
        interval = welch_interval(
            baseline.log_throughput_of_lines, other.log_throughput_of_lines, confidence
        )
        contrast = Contrast(interval, runs_needed=None, is_paired=False)
        text = throughput_text.ratio_text_of_single_runs(samples.baseline, samples.other, interval)
    return GroupVerdict(
        group=other.group.label,
        baseline=baseline.group.label,
        figure=metric_named(THROUGHPUT).label,
        text=text,
        samples=samples,
        contrast=contrast,
    )
