"""Counts what a killed and resumed training did to samples and logged rows.

This module imports no library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Update:
    """One optimizer update over all processes."""

    number: int  # from 1: how many updates the weights have had after it
    epoch: int  # from 0, as the framework numbers it
    samples: tuple[int, ...]


@dataclass(frozen=True)
class SampleCounts:
    """How often an epoch's samples were used, in the updates that the final weights have had."""

    repeated: dict[int, int]  # by epoch: uses of samples beyond the first
    lost: dict[int, int]  # by epoch: samples that were not used

    @property
    def all_repeated(self) -> int:
        """Return the sum over epochs."""
        return sum(self.repeated.values())

    @property
    def all_lost(self) -> int:
        """Return the sum over epochs."""
        return sum(self.lost.values())


def merge_ranks(ranks: Sequence[Iterable[Update]], *, stopped_at: int | None) -> list[Update]:
    """Return the updates of an attempt that all its processes have recorded.

    Args:
        ranks: the updates that each process recorded, in order.
        stopped_at: the update at which the attempt was killed. Later updates may be in the record
            of some processes only, and are left out then.

    Raises:
        ValueError: a process lacks an update that another one has, or is in another epoch.
    """
    by_rank = [{update.number: update for update in updates} for updates in ranks]
    numbers = sorted(set().union(*by_rank))
    merged = []
    for number in numbers:
        parts = [updates[number] for updates in by_rank if number in updates]
        if len(parts) < len(by_rank):
            if stopped_at is not None and number > stopped_at:
                break
            raise ValueError(f"update {number} is missing in the record of a process")
        if len({part.epoch for part in parts}) > 1:
            raise ValueError(f"processes differ in the epoch of update {number}")
        samples = tuple(sample for part in parts for sample in part.samples)
        merged.append(Update(number, parts[0].epoch, samples))
    return merged


def final_trajectory(attempts: Iterable[Sequence[Update]]) -> list[Update]:
    """Return the updates that the final weights have had.

    Each attempt begins with the update after that of its checkpoint. The updates from there on of
    earlier attempts were rolled back, and don't count.

    Raises:
        ValueError: the number of an update is missing.
    """
    kept: list[Update] = []
    for updates in attempts:
        if updates:
            first = updates[0].number
            kept = [update for update in kept if update.number < first] + list(updates)
    numbers = [update.number for update in kept]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"the updates are not numbered one after the other: {numbers}")
    return kept


def count_samples(
    trajectory: Iterable[Update], samples: int, epochs: Collection[int]
) -> SampleCounts:
    """Count repeated and lost samples of each epoch.

    Args:
        samples: of the training data; each should be used once in an epoch.
        epochs: those that the training should have. Others in which it was are counted, too.
    """
    uses: dict[int, Counter[int]] = {epoch: Counter() for epoch in epochs}
    for update in trajectory:
        uses.setdefault(update.epoch, Counter()).update(update.samples)
    return SampleCounts(
        repeated={epoch: counter.total() - len(counter) for epoch, counter in uses.items()},
        lost={epoch: samples - len(counter) for epoch, counter in uses.items()},
    )


def count_other_batches(trajectory: Iterable[Update], reference: Iterable[Update]) -> int:
    """Count the updates whose samples differ from those of the uninterrupted training.

    The order of samples within a batch does not matter. An update that only one of both has is
    different.
    """
    here = {update.number: sorted(update.samples) for update in trajectory}
    there = {update.number: sorted(update.samples) for update in reference}
    return sum(here.get(number) != there.get(number) for number in here.keys() | there.keys())


def count_repeated_orders(trajectory: Iterable[Update]) -> int:
    """Count the epochs whose samples come in the same order as in an earlier epoch."""
    orders: dict[int, list[tuple[int, ...]]] = {}
    for update in trajectory:
        orders.setdefault(update.epoch, []).append(tuple(sorted(update.samples)))
    different = {tuple(order) for order in orders.values()}
    return len(orders) - len(different)


def count_rows(steps: Iterable[int], expected: Iterable[int]) -> tuple[int, int]:
    """Count lost and doubled rows of a log.

    Args:
        steps: the steps of the rows, in any order.
        expected: the steps of the uninterrupted training, once each.

    Returns:
        How many expected steps have no row, and how many rows are more than the first of an
        expected step. Rows at other steps count as doubled.
    """
    rows: Mapping[int, int] = Counter(steps)
    expected_steps = set(expected)
    lost = sum(step not in rows for step in expected_steps)
    doubled = sum(count - (step in expected_steps) for step, count in rows.items())
    return lost, doubled
