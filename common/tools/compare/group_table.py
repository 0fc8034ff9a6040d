"""The table of groups: means and standard deviations over the seeds of each group."""

from collections.abc import Sequence

from common.tools.compare.comparison import Comparison
from common.tools.compare.repetitions import (
    finished_indices,
    sample_of_runs,
    sample_of_seeds,
    seed_of,
)
from common.tools.compare.rows import FigureRow, figure_rows
from common.tools.statistics.samples import Sample
from common.track.names import Metric

MEAN_AND_DEVIATION = "mean ± standard deviation"
MAX_SEEDS = 12  # the most seeds that a cell lists


def has_repetitions(comparison: Comparison) -> bool:
    """Return whether any group has several runs; otherwise there is nothing to take means of."""
    return any(len(group.run_indices) > 1 for group in comparison.groups)


def group_labels(comparison: Comparison, *, relative: bool = True) -> list[str]:
    """Return the groups' labels; if `relative`, the first of several is marked as the baseline."""
    labels = [group.label for group in comparison.groups]
    if relative and len(labels) > 1:
        labels[0] += " (baseline)"
    return labels


def group_cells(comparison: Comparison, *, relative: bool = True) -> list[list[str]]:
    """Return the table of groups as rows of cells, the heading first.

    Args:
        comparison: the runs in their groups, the baseline first.
        relative: whether cells contain ratios to the baseline, which is then marked. A model card
            has none, because it shows the column of one group alone.
    """
    corner = MEAN_AND_DEVIATION if has_repetitions(comparison) else ""
    rows = [[corner, *group_labels(comparison, relative=relative)]]
    if has_repetitions(comparison):
        rows.append(["runs", *cells_of_run_counts(comparison)])
        rows.append(["seeds", *cells_of_seeds(comparison)])
    for row in figure_rows(comparison):
        samples = samples_of(row, comparison)
        if any(sample.count for sample in samples):
            rows.append([row.heading, *cells_of(row, samples, comparison, relative=relative)])
    return rows


def cells_of_run_counts(comparison: Comparison) -> list[str]:
    """Return how many runs of each group finished, and how many were left out: ``3 (1 left out)``.

    Unfinished runs are left out, and so are copies of a run.
    """
    cells = []
    for group in comparison.groups:
        count = len(finished_indices(comparison, group))
        left_out = len(group.run_indices) - count
        cells.append(f"{count} ({left_out} left out)" if left_out else str(count))
    return cells


def cells_of_seeds(comparison: Comparison) -> list[str]:
    """Return the seeds of each group's finished runs, such as ``0 1 2``.

    A cell has only the number of seeds if they are many, or if a run does not state its seed.
    """
    cells = []
    for group in comparison.groups:
        indices = finished_indices(comparison, group)
        seeds = [*dict.fromkeys(seed_of(comparison.runs[index]) for index in indices)]
        # `seed_of` returns a text that is no number for a run that does not state its seed.
        are_stated = all(seed.isdecimal() for seed in seeds)
        is_listed = are_stated and len(seeds) <= MAX_SEEDS
        cells.append(" ".join(seeds) if is_listed else f"{len(seeds)} seeds")
    return cells


def samples_of(row: FigureRow, comparison: Comparison) -> list[Sample]:
    """Return the sample of each group for one metric.

    Each seed counts once for a metric of the trained model, and each run for any other metric.
    """
    describe_group = sample_of_seeds if row.is_of_model else sample_of_runs
    return [describe_group(comparison, group, row.values) for group in comparison.groups]


def cells_of(
    row: FigureRow, samples: Sequence[Sample], comparison: Comparison, *, relative: bool
) -> list[str]:
    """Return the cells of one metric: mean, standard deviation, and any ratio to the baseline.

    Args:
        row: the metric of all runs.
        samples: each group's values of the metric, in the order of the groups.
        comparison: the runs in their groups, the baseline first.
        relative: whether cells contain ratios.
    """
    # A device's memory and the host's can't be compared, so they have no ratio.
    are_comparable = len(set(row.known_qualifiers.values())) <= 1
    # `row.ratios` are those of the table of runs: of speed and of memory. This table also has a
    # ratio of energy.
    is_of_cost = bool(row.ratios) or row.metric.panel == "Energy"
    has_ratio = relative and are_comparable and is_of_cost
    cells = []
    for number, (group, sample) in enumerate(zip(comparison.groups, samples, strict=True)):
        cell = mean_and_deviation_text(row.metric, sample)
        known_indices = [index for index in group.run_indices if row.values[index] is not None]
        if known_indices:
            cell += row.suffix(known_indices[0])
        if number > 0 and has_ratio:  # group 0 is the baseline
            cell += ratio_suffix(sample, samples[0])
        cells.append(cell)
    return cells


def mean_and_deviation_text(metric: Metric, sample: Sample) -> str:
    """Return a mean with its standard deviation if it has one, such as ``0.9750 ± 0.0031``."""
    if sample.deviation is None:
        return metric.text(sample.mean)
    return f"{metric.text(sample.mean)} ± {metric.text(sample.deviation)}"


def ratio_suffix(sample: Sample, baseline: Sample) -> str:
    """Return the ratio of two means as a suffix of a cell; empty if it is unknown."""
    if sample.mean is None or not baseline.mean:  # nothing can be divided by 0
        return ""
    return f" ({sample.mean / baseline.mean:.2f}×)"
