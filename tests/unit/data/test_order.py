"""The order of samples: a function of seed, epoch and effective batch alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.order import (
    WINDOW,
    Blocks,
    EvaluationOrder,
    TrainingOrder,
    hash_integers,
    random_bits,
    rehearsal_batches,
)
from common.errors import UserError

# Ways to make a global batch of 24: (batch size per process, accumulation, processes).
SPLITS = [(24, 1, 1), (12, 2, 1), (12, 1, 2), (4, 3, 2), (2, 3, 4), (1, 24, 1)]


def lengths_of(count: int) -> np.ndarray:
    """Return lengths of texts, with many ties."""
    return np.random.default_rng(0).integers(3, 40, count)


def orders(num_samples: int, split: tuple[int, int, int], grouped: bool) -> list[TrainingOrder]:
    """Return the orders of all ranks."""
    batch_size, accumulation, world_size = split
    lengths = lengths_of(num_samples) if grouped else None
    return [
        TrainingOrder(num_samples, batch_size, accumulation, world_size, rank, 7, lengths)
        for rank in range(world_size)
    ]


def global_batches(
    num_samples: int, split: tuple[int, int, int], grouped: bool, epoch: int, first: int = 0
) -> list[list[int]]:
    """Return the sorted samples of each update of an epoch, over all ranks."""
    ranks = orders(num_samples, split, grouped)
    accumulation = split[1]
    batches = [order.micro_batches(epoch, first) for order in ranks]
    updates = []
    for start in range(0, len(batches[0]), accumulation):
        parts = [rank[start : start + accumulation].flatten() for rank in batches]
        updates.append(sorted(torch.cat(parts).tolist()))
    return updates


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_global_batches_do_not_depend_on_the_split(
    split: tuple[int, int, int], grouped: bool
) -> None:
    """An update has the same 24 samples on any number of processes and micro-batches."""
    for epoch in range(2):
        expected = global_batches(1003, SPLITS[0], grouped, epoch)
        assert global_batches(1003, split, grouped, epoch) == expected
        assert len(expected) == 1003 // 24


@pytest.mark.parametrize("grouped", [False, True])
def test_each_sample_comes_once_an_epoch(grouped: bool) -> None:
    """No rank repeats a sample, and the last, incomplete batch is dropped."""
    ranks = orders(1003, (4, 3, 2), grouped)
    samples = torch.cat([order.micro_batches(3).flatten() for order in ranks])
    assert len(samples) == len(samples.unique()) == 1003 // 24 * 24
    assert 0 <= samples.min() <= samples.max() < 1003


@pytest.mark.parametrize("grouped", [False, True])
def test_order_differs_by_epoch_and_seed(grouped: bool) -> None:
    """The same epoch and seed always give the same order."""
    first = orders(1003, (24, 1, 1), grouped)[0]
    other = TrainingOrder(1003, 24, 1, 1, 0, 8, lengths_of(1003) if grouped else None)
    assert torch.equal(first.micro_batches(0), first.micro_batches(0))
    assert not torch.equal(first.micro_batches(0), first.micro_batches(1))
    assert not torch.equal(first.micro_batches(0), other.micro_batches(0))
    # Epoch 1 of one seed is not epoch 0 of the next seed.
    assert not torch.equal(first.micro_batches(1), other.micro_batches(0))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("first_update", [0, 1, 17, 41])
def test_seeking_gives_the_rest_of_an_epoch(first_update: int, grouped: bool) -> None:
    """From an update on, the order equals that of an uninterrupted epoch."""
    for order in orders(1003, (4, 3, 2), grouped):
        whole = order.micro_batches(2)
        assert torch.equal(order.micro_batches(2, first_update), whole[3 * first_update :])


def test_seeking_works_on_another_world_size() -> None:
    """A position counts updates, so other processes continue with the same samples."""
    rest = global_batches(1003, (12, 2, 1), True, 1, first=11)
    assert rest == global_batches(1003, (2, 3, 4), True, 1)[11:]


def test_grouping_puts_similar_lengths_together() -> None:
    """Grouped batches need far less padding, and still come in random order."""
    lengths = lengths_of(24 * WINDOW * 2)
    padding = {}
    for grouped in (False, True):
        order = orders(len(lengths), (24, 1, 1), grouped)[0]
        batches = torch.from_numpy(lengths)[order.micro_batches(0)]
        padding[grouped] = float((batches.max(1).values[:, None] - batches).float().mean())
        longest = batches.max(1).values.tolist()
        assert longest != sorted(longest)
    assert padding[True] < padding[False] / 5


def test_too_few_samples_for_one_update_are_refused() -> None:
    """The message has both numbers and the flag."""
    with pytest.raises(UserError) as error:
        TrainingOrder(23, 4, 3, 2, 0, 0)
    assert "23" in error.value.message
    assert "24" in error.value.message
    assert "--batch-size" in error.value.message
    assert TrainingOrder(24, 4, 3, 2, 0, 0).updates_per_epoch == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 67, 360])
@pytest.mark.parametrize("grouped", [False, True])
def test_evaluation_has_each_sample_once(num_samples: int, world_size: int, grouped: bool) -> None:
    """All ranks together have each sample once, and equal shares up to one sample."""
    lengths = lengths_of(num_samples) if grouped else None
    ranks = [
        EvaluationOrder(num_samples, 8, world_size, rank, lengths).batches()
        for rank in range(world_size)
    ]
    samples = torch.cat([batch for batches in ranks for batch in batches]).tolist()
    assert sorted(samples) == list(range(num_samples))
    counts = [sum(map(len, batches)) for batches in ranks]
    assert max(counts) - min(counts) <= 1
    assert all(len(batch) <= 8 for batches in ranks for batch in batches)


@pytest.mark.parametrize("grouped", [False, True])
def test_rank_without_samples_has_no_batch(grouped: bool) -> None:
    """With more ranks than samples, it has no batch instead of an empty one."""
    lengths = lengths_of(1) if grouped else None
    assert EvaluationOrder(1, 8, 2, 1, lengths).batches() == []


def test_random_bits_depend_on_seed_epoch_and_sample_only() -> None:
    """The other samples of a batch do not matter."""
    indices = torch.arange(10_000)
    bits = random_bits(3, 5, indices)
    chosen = torch.tensor([9, 4_321, 17])
    assert torch.equal(random_bits(3, 5, chosen), bits[chosen])
    assert 0 <= bits.min() <= bits.max() < 2**31
    assert len(bits.unique()) > 9_990
    for seed, epoch in ((3, 6), (4, 5), (5, 3)):
        assert (random_bits(seed, epoch, indices) == bits).float().mean() < 0.001


@pytest.mark.parametrize("bit", [0, 7, 15, 23, 30])
def test_each_random_bit_is_fair(bit: int) -> None:
    """Each bit is set for half of the samples, whatever the epoch and the next sample."""
    indices = torch.arange(50_000)
    first = random_bits(0, 0, indices)
    second = random_bits(0, 1, indices)
    flips = first >> bit & 1
    later = second >> bit & 1
    assert abs(flips.float().mean() - 0.5) < 0.02
    assert abs((flips == later).float().mean() - 0.5) < 0.02
    assert abs((flips[1:] == flips[:-1]).float().mean() - 0.5) < 0.02


def test_hash_has_63_bits_and_depends_on_the_order() -> None:
    """Near integers give unrelated numbers, which torch accepts as seeds."""
    values = [hash_integers(first, second) for first in range(50) for second in range(50)]
    assert len(set(values)) == 2500
    assert all(0 <= value < 2**63 for value in values)
    assert hash_integers(1, 2) != hash_integers(2, 1)


def test_order_never_changes_between_versions() -> None:
    """A run that an earlier version started continues with the same samples."""
    plain = TrainingOrder(1003, 4, 3, 2, 1, 7).micro_batches(2, 40)
    grouped = TrainingOrder(1003, 4, 3, 2, 1, 7, lengths_of(1003)).micro_batches(2, 40)
    assert plain.tolist() == [[569, 501, 423, 598], [563, 874, 70, 999], [965, 815, 218, 715]]
    assert grouped.tolist() == [[260, 485, 115, 521], [626, 475, 101, 104], [721, 99, 299, 781]]
    bits = random_bits(3, 5, torch.arange(4)).tolist()
    assert bits == [
        311024839,
        627027861,
        664197668,
        509411558,
    ]


@pytest.mark.parametrize("num_samples", [16, 17, 31, 32, 33, 61])
@pytest.mark.parametrize("batch_size", [2, 3, 8])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_evaluate_equally_many_batches(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    """Ranks of a sharded model wait for each other at each batch, so none may lack one."""
    orders = [
        EvaluationOrder(num_samples, batch_size, world_size, rank, lengths=None)
        for rank in range(world_size)
    ]
    counts = []
    for order in orders:
        counts.append([len(batch) for batch in order.batches()])
    assert {len(sizes) for sizes in counts} == {orders[0].most_batches}
    assert all(size > 0 for sizes in counts for size in sizes)
    assert sum(map(sum, counts)) == num_samples


def blocks_of(count: int, at_once: int = 7) -> Blocks:
    """Return blocks of uneven sizes, `count` samples in all."""
    ends = np.unique(np.random.default_rng(1).integers(1, count, 40))
    return Blocks(np.diff([0, *ends, count]), at_once)


def by_blocks(
    split: tuple[int, int, int], epoch: int = 0, first: int = 0, at_once: int = 7
) -> list[list[int]]:
    """Return the samples of each update of an epoch, in order, over all ranks."""
    _, accumulation, world_size = split
    ranks = []
    for rank in range(world_size):
        order = TrainingOrder(1003, *split, rank, 7, blocks=blocks_of(1003, at_once))
        ranks.append(list(order.micro_batches(epoch, first)))
    updates = []
    for start in range(0, len(ranks[0]), accumulation):
        parts = [
            micro_batches[start + part] for part in range(accumulation) for micro_batches in ranks
        ]
        updates.append(torch.cat(parts).tolist())
    return updates


@pytest.mark.parametrize("split", SPLITS)
def test_order_by_blocks_does_not_depend_on_the_split(split: tuple[int, int, int]) -> None:
    """Each sample comes once, each epoch has a new order, and seeking works from any update."""
    for epoch in (0, 1):
        updates = by_blocks(split, epoch)
        assert updates == by_blocks(SPLITS[0], epoch)
        flat = [sample for update in updates for sample in update]
        assert len(flat) == len({*flat}) == 1003 // 24 * 24
        assert 0 <= min(flat) <= max(flat) < 1003
        assert by_blocks(split, epoch, first=17) == updates[17:]
    assert by_blocks(split, 0) != by_blocks(split, 1)


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_update_reads_no_more_blocks_than_may_be_held(at_once: int) -> None:
    """One more is read where a lane continues with its next block."""
    ends = blocks_of(1003).sizes.cumsum()
    lanes = {1: 1, 7: 6, 64: 24}[at_once]  # numbers that divide an update of 24
    counts = []
    for update in by_blocks(SPLITS[0], 0, 0, at_once):
        blocks = {*np.searchsorted(ends, update, side="right")}
        counts.append(len(blocks))
    assert np.median(counts) <= lanes + 1
    assert np.median(counts) > lanes / 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_by_blocks_has_each_sample_once(world_size: int) -> None:
    """Each rank reads one stretch, so that two ranks share one block at most."""
    ranks = [
        torch.cat(
            EvaluationOrder(67, 8, world_size, rank, blocks=blocks_of(67), lengths=None).batches()
        )
        for rank in range(world_size)
    ]
    assert torch.cat(ranks).tolist() == [*range(67)]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_samples", [1, 3, 8, 17, 37])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_batches_have_each_sample_once(
    num_samples: int, world_size: int, grouped: bool
) -> None:
    """All ranks have equally many batches of one size, and the mask marks each sample once."""
    lengths = lengths_of(num_samples) if grouped else None
    sizes = set()
    real = []
    for rank in range(world_size):
        order = EvaluationOrder(num_samples, 4, world_size, rank, lengths)
        batches = order.equal_batches()
        sizes.add(tuple(len(batch) for batch in batches.indices))
        for indices, is_real in zip(*batches, strict=True):
            assert len(indices) == len(is_real) <= 4
            assert indices.max() < num_samples
            real += indices[is_real].tolist()
    assert len(sizes) == 1
    assert len(set(*sizes)) == 1
    assert sorted(real) == [*range(num_samples)]


def test_equal_batches_by_blocks_have_each_sample_once() -> None:
    """Each rank reads a stretch of its own."""
    blocks = Blocks(np.array([5, 6, 6]), at_once=2)
    ranks = [
        EvaluationOrder(17, 4, 2, rank, blocks=blocks, lengths=None).equal_batches()
        for rank in (0, 1)
    ]
    assert [len(batches.indices) for batches in ranks] == [3, 3]
    real = []
    for batches in ranks:
        for indices, is_real in zip(*batches, strict=True):
            real += indices[is_real].tolist()
    assert sorted(real) == [*range(17)]


def test_rehearsal_is_half_a_batch_and_then_that_half_twice() -> None:
    """No batch exceeds an evaluation's, and a rank without samples has none."""
    two = [torch.arange(9), torch.arange(9, 13)]
    assert [batch.tolist() for batch in rehearsal_batches(two, 9, is_spread=True)] == [
        [0, 3, 6, 9],
        [0, 3, 6, 9] * 2,
    ]
    first = rehearsal_batches(two, 9, is_spread=False)
    assert [batch.tolist() for batch in first] == [[0, 1, 2, 3], [0, 1, 2, 3] * 2]
    assert [
        batch.tolist() for batch in rehearsal_batches([torch.arange(1)], 9, is_spread=True)
    ] == [[0], [0, 0]]
    assert [
        batch.tolist() for batch in rehearsal_batches([torch.arange(1)], 1, is_spread=True)
    ] == [[0]]
    assert rehearsal_batches([], 9, is_spread=True) == []


def test_rehearsal_of_sorted_samples_has_all_classes() -> None:
    """Images in one folder per class are sorted, so a first batch alone would have one class."""
    labels = torch.arange(10).repeat_interleave(100)
    for rank in range(2):
        batches = EvaluationOrder(1000, 32, 2, rank, lengths=None).batches()
        assert len(labels[batches[0]].unique()) < 10
        for samples in rehearsal_batches(batches, 32, is_spread=True):
            assert len(labels[samples].unique()) == 10
            assert len(samples) <= 32
