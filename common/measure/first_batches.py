"""What the first two batches of an evaluation say about mistakes in the recipe's calls of `Sums`.

A rehearsal of the evaluation shows the mistakes: its second batch has the samples of the first
batch twice. A total doubles with the samples, and so does a count of samples. A mean stays the
same. Other evaluations have no such batches.

An evaluation may draw random numbers, or compare the samples of a batch with each other. Then the
two batches have unrelated numbers of hits, whose ratio may look like a mistake by chance. So
numbers of hits are never taken for a mistake.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from common.measure.value_checks import Measured, Value

Totals = dict[str, torch.Tensor]
# A function that computes figures from totals, which are float64 on the host and include "count".
Finish = Callable[[Totals], Mapping[str, Measured]]

# A value counts as halved, equal or doubled up to this relative error.
RATIO_ERROR = 0.001
# The loss may have a larger error, because it may be computed in bf16, which is less exact.
RATIO_ERROR_OF_LOSS = 0.01
# A first batch with fewer samples shows no mistake, for two reasons. A contrastive loss is a mean,
# but it begins near log(samples), which doubles from 2 to 4 samples, or near log(2 × samples),
# which doubles from 1 to 2. And a count of 1 may be right: the samples may form one group.
MIN_SAMPLES = 3


@dataclass
class BatchTotals:
    """The arguments of one call of `Sums.add`."""

    count: Value  # samples
    totals: dict[str, Value]

    def on_host(self) -> Totals:
        """Return the totals in the form that `finish` takes: float64, on the host."""
        values = {"count": self.count, **self.totals}
        return {name: torch.as_tensor(value).cpu().double() for name, value in values.items()}


@dataclass
class BatchMeans:
    """The arguments of one call of `Sums.record`."""

    count: Value  # samples
    means: dict[str, Value]  # the loss and metrics that are single numbers, by name
    sizes: dict[str, int]  # the number of elements of other metrics, by name


@dataclass
class FirstBatches:
    """The first two calls of `Sums.add` and of `Sums.record` in an evaluation, on one rank."""

    added: list[BatchTotals] = field(default_factory=list)
    recorded: list[BatchMeans] = field(default_factory=list)
    add_calls: int = 0
    record_calls: int = 0

    def note_added(self, count: Value, totals: dict[str, Value]) -> None:
        """Note a call of `Sums.add`."""
        self.add_calls += 1
        if self.add_calls <= 2:
            self.added.append(BatchTotals(count, totals))

    def note_recorded(self, count: Value, values: Mapping[str, Value]) -> None:
        """Note a call of `Sums.record`, with its loss and metrics."""
        self.record_calls += 1
        if self.record_calls > 2:
            return
        means = {}
        sizes = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                sizes[name] = value.numel()
            else:
                means[name] = value
        self.recorded.append(BatchMeans(count, means, sizes))

    def means_for_totals(self, finish: Finish | None) -> list[str]:
        """Return the names of figures for which the recipe gave means to `Sums.add`, not totals.

        Such a mistake makes a figure too small. The figure of a total, total / count, is the same
        for both batches. That of a mean halves.
        """
        # Recorded values are means by definition, and `finish` may need them.
        if len(self.added) < 2 or self.recorded:
            return []
        once, twice = (batch.on_host() for batch in self.added)
        if once.keys() != twice.keys() or float(twice["count"]) != 2 * float(once["count"]):
            return []
        figures_once = comparable_figures(once, finish)
        figures_twice = comparable_figures(twice, finish)
        return [
            name
            for name in names_with_ratio(figures_once, figures_twice, 0.5)
            # Two batches may have the same whole number of hits by chance.
            if name == "loss" or not is_whole(once[name])
        ]

    def totals_for_means(self) -> list[str]:
        """Return the names of single numbers that were given to `Sums.record` as totals.

        Such a number counts as the mean of its batch, so the figure would grow with the batches.
        """
        if len(self.recorded) < 2:
            return []
        once, twice = self.recorded
        count = float(once.count)
        if count < MIN_SAMPLES or float(twice.count) != 2 * count:
            return []
        return [
            name
            for name in names_with_ratio(once.means, twice.means, 2)
            # The second batch may have four times the hits, twice their share, by chance.
            if name == "loss" or not is_share(once.means[name], count)
        ]

    def wrong_counts(self, batch_sizes: Sequence[int], finish: Finish | None) -> dict[str, float]:
        """Return the wrong numbers of samples that the recipe passed, by the call that got them.

        The second batch has twice the samples, so a number that is the same for both is suspicious.
        It may be right: it may count groups, or samples that the recipe generates. So it counts as
        wrong only if it is 1, or if the values of the batches show that they depend on the samples.

        Args:
            batch_sizes: the samples of each batch that the loaders gave to this evaluation.
        """
        if len(batch_sizes) != 2 or batch_sizes[1] != 2 * batch_sizes[0]:
            return {}
        batch_size = batch_sizes[0]
        wrong = {}
        if self.record_calls == 2:
            recorded_once, recorded_twice = self.recorded
            if is_wrong_recorded_count(recorded_once, recorded_twice, batch_size):
                wrong["sums.record"] = float(recorded_once.count)
        if self.add_calls == 2:
            added_once, added_twice = self.added
            # `finish` may use the count for something else than samples.
            is_wrong = (
                is_wrong_added_count(added_once, added_twice, batch_size)
                if finish is None
                else is_wrong_count_of_loss(added_once, added_twice, batch_size, finish)
            )
            if is_wrong:
                wrong["sums.add"] = float(added_once.count)
        return wrong


def is_wrong_recorded_count(once: BatchMeans, twice: BatchMeans, batch_size: int) -> bool:
    """Whether a count of `Sums.record`, the same for both batches, can't be one of samples.

    Args:
        batch_size: the samples of the first batch.
    """
    if not has_same_count(once, twice):
        return False
    count = float(once.count)
    sizes_double = any(2 * size == twice.sizes.get(name) for name, size in once.sizes.items())
    # The mean over generated samples mostly differs between the batches. Shares of hits may agree
    # by chance.
    has_same_means = any(
        name == "loss" or not is_share(once.means[name], count)
        for name in names_with_ratio(once.means, twice.means, 1, error_of_loss=RATIO_ERROR)
    )
    has_too_many = count > batch_size and has_same_means
    return is_one_for_several(count, batch_size) or has_too_many or sizes_double


def is_wrong_added_count(once: BatchTotals, twice: BatchTotals, batch_size: int) -> bool:
    """Whether a count of `Sums.add`, the same for both batches, can't be one of samples.

    Args:
        batch_size: the samples of the first batch.
    """
    if not has_same_count(once, twice):
        return False
    totals_double = any(
        name == "loss" or not is_whole(once.totals[name])
        for name in names_with_ratio(once.totals, twice.totals, 2)
    )
    return is_one_for_several(float(once.count), batch_size) or totals_double


def is_wrong_count_of_loss(
    once: BatchTotals, twice: BatchTotals, batch_size: int, finish: Finish
) -> bool:
    """Whether a count of `Sums.add`, the same for both batches, makes the loss grow with samples.

    Args:
        batch_size: the samples of the first batch.
        finish: computes the figures. Only its figure "loss" is surely a mean.
    """
    if batch_size < MIN_SAMPLES or not has_same_count(once, twice):
        return False
    figures_once = comparable_figures(once.on_host(), finish)
    figures_twice = comparable_figures(twice.on_host(), finish)
    return bool(names_with_ratio(figures_once, figures_twice, 2))


def has_same_count(once: BatchMeans | BatchTotals, twice: BatchMeans | BatchTotals) -> bool:
    """Whether both batches have the same count, and it is not 0."""
    count = float(once.count)
    return count != 0 and count == float(twice.count)


def is_one_for_several(count: float, batch_size: int) -> bool:
    """Whether the count is 1 for a batch with enough samples to be no single group."""
    return count == 1 and batch_size >= MIN_SAMPLES


def comparable_figures(totals: Totals, finish: Finish | None) -> Mapping[str, Measured]:
    """Return the figures of one batch that should not depend on its size."""
    if finish is None:
        return {name: total / totals["count"] for name, total in totals.items()}
    # `finish` may compute anything. Only its figure "loss" is surely a mean.
    return {name: value for name, value in finish(totals).items() if name == "loss"}


def is_whole(value: Value) -> bool:
    """Whether a single number is a whole one, as a total of hits is."""
    return float(value).is_integer()


def is_share(value: Value, count: float) -> bool:
    """Whether a single number may be the share of hits among so many samples."""
    hits = float(value) * count
    return 0 <= float(value) < 1 and abs(hits - round(hits)) <= RATIO_ERROR


def names_with_ratio(
    once: Mapping[str, Measured],
    twice: Mapping[str, Measured],
    ratio: float,
    error_of_loss: float = RATIO_ERROR_OF_LOSS,
) -> list[str]:
    """Return the names of single numbers that change by a factor from one batch to the other.

    Args:
        once: the numbers of the first batch, by name.
        twice: those of the second batch, which has each sample twice.
        error_of_loss: the largest relative error of the factor for the loss.
    """
    names = []
    for name, value in once.items():
        error = error_of_loss if name == "loss" else RATIO_ERROR
        if name in twice and has_ratio(value, twice[name], ratio, error):
            names.append(name)
    return names


def has_ratio(value_before: Measured, value_after: Measured, ratio: float, error: float) -> bool:
    """Whether a single number changes by this factor if a batch has each sample twice.

    A zero says nothing.

    Args:
        error: the largest relative error of the factor, which comes from rounding.
    """
    # On the host, because some devices have no float64.
    before = torch.as_tensor(value_before).cpu().double()
    after = torch.as_tensor(value_after).cpu().double()
    if before.numel() != 1 or after.numel() != 1 or not float(before):
        return False
    return abs(float(after / before) / ratio - 1) <= error
