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

# Ways of making a global batch of 24: per process, accumulation, processes.
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
    return [
        sorted(torch.cat([rank[i : i + accumulation].flatten() for rank in batches]).tolist())
        for i in range(0, len(batches[0]), accumulation)
    ]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_global_batches_do_not_depend_on_the_split(
    split: tuple[int, int, int], grouped: bool
) -> None:
    """However 24 samples are split into processes and micro-batches, an update has the same."""
    for epoch in range(2):
        expected = global_batches(1003, SPLITS[0], grouped, epoch)
        assert global_batches(1003, split, grouped, epoch) == expected
        assert len(expected) == 1003 // 24


@pytest.mark.parametrize("grouped", [False, True])
def test_each_sample_comes_once_an_epoch(grouped: bool) -> None:
    """An epoch has no sample twice, on any rank, and drops the last, incomplete batch."""
    ranks = orders(1003, (4, 3, 2), grouped)
    samples = torch.cat([order.micro_batches(3).flatten() for order in ranks])
    assert len(samples) == len(samples.unique()) == 1003 // 24 * 24
    assert 0 <= samples.min() <= samples.max() < 1003


@pytest.mark.parametrize("grouped", [False, True])
def test_epochs_and_seeds_have_orders_of_their_own(grouped: bool) -> None:
    """The order is another in each epoch and for each seed, and the same when asked again."""
    first = orders(1003, (24, 1, 1), grouped)[0]
    other = TrainingOrder(1003, 24, 1, 1, 0, 8, lengths_of(1003) if grouped else None)
    assert torch.equal(first.micro_batches(0), first.micro_batches(0))
    assert not torch.equal(first.micro_batches(0), first.micro_batches(1))
    assert not torch.equal(first.micro_batches(0), other.micro_batches(0))
    # Neither epoch 1 of one seed nor epoch 0 of the next.
    assert not torch.equal(first.micro_batches(1), other.micro_batches(0))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("first_update", [0, 1, 17, 41])
def test_seeking_gives_the_rest_of_an_epoch(first_update: int, grouped: bool) -> None:
    """Starting at an update gives what an uninterrupted epoch has from there on."""
    for order in orders(1003, (4, 3, 2), grouped):
        whole = order.micro_batches(2)
        assert torch.equal(order.micro_batches(2, first_update), whole[3 * first_update :])


def test_seeking_is_the_same_on_another_world_size() -> None:
    """A position is a number of updates, so another split goes on with the same samples."""
    rest = global_batches(1003, (12, 2, 1), True, 1, first=11)
    assert rest == global_batches(1003, (2, 3, 4), True, 1)[11:]


def test_grouping_puts_like_lengths_together() -> None:
    """Grouped batches need far less padding, and come in random order."""
    lengths = lengths_of(24 * WINDOW * 2)
    padding = {}
    for grouped in (False, True):
        order = orders(len(lengths), (24, 1, 1), grouped)[0]
        batches = torch.from_numpy(lengths)[order.micro_batches(0)]
        padding[grouped] = float((batches.max(1).values[:, None] - batches).float().mean())
        longest = batches.max(1).values.tolist()
        assert longest != sorted(longest)
    assert padding[True] < padding[False] / 5


def test_too_few_samples_for_one_update_is_a_mistake() -> None:
    """A training split smaller than the effective batch ends in a message with both numbers."""
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
    """Over all ranks each sample comes exactly once, shared out evenly."""
    lengths = lengths_of(num_samples) if grouped else None
    ranks = [
        EvaluationOrder(num_samples, 8, world_size, rank, lengths).micro_batches()
        for rank in range(world_size)
    ]
    samples = [int(sample) for batches in ranks for batch in batches for sample in batch]
    assert sorted(samples) == list(range(num_samples))
    counts = [sum(map(len, batches)) for batches in ranks]
    assert max(counts) - min(counts) <= 1
    assert all(len(batch) <= 8 for batches in ranks for batch in batches)


@pytest.mark.parametrize("grouped", [False, True])
def test_rank_without_samples_has_no_batch(grouped: bool) -> None:
    """More ranks than samples leave a rank with no batch, not with an empty one."""
    lengths = lengths_of(1) if grouped else None
    assert EvaluationOrder(1, 8, 2, 1, lengths).micro_batches() == []


def test_random_bits_are_a_function_of_seed_epoch_and_sample() -> None:
    """A sample's bits don't depend on its batch, and differ between samples, epochs and seeds."""
    samples = torch.arange(10_000)
    bits = random_bits(3, 5, samples)
    chosen = torch.tensor([9, 4_321, 17])
    assert torch.equal(random_bits(3, 5, chosen), bits[chosen])
    assert 0 <= bits.min() <= bits.max() < 2**31
    assert len(bits.unique()) > 9_990
    for seed, epoch in ((3, 6), (4, 5), (5, 3)):
        assert (random_bits(seed, epoch, samples) == bits).float().mean() < 0.001


@pytest.mark.parametrize("bit", [0, 7, 15, 23, 30])
def test_each_random_bit_is_fair(bit: int) -> None:
    """Each bit is set for half of the samples, whatever the epoch, and independent of the next."""
    samples = torch.arange(50_000)
    first, second = random_bits(0, 0, samples), random_bits(0, 1, samples)
    flips, later = first >> bit & 1, second >> bit & 1
    assert abs(flips.float().mean() - 0.5) < 0.02
    assert abs((flips == later).float().mean() - 0.5) < 0.02
    assert abs((flips[1:] == flips[:-1]).float().mean() - 0.5) < 0.02


def test_hash_is_of_63_bits_and_depends_on_order() -> None:
    """Near integers give unrelated numbers that torch takes as a seed."""
    values = [hash_integers(first, second) for first in range(50) for second in range(50)]
    assert len(set(values)) == 2500
    assert all(0 <= value < 2**63 for value in values)
    assert hash_integers(1, 2) != hash_integers(2, 1)


def test_order_is_that_of_earlier_checkpoints() -> None:
    """A run that an earlier version began goes on with the same samples."""
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
def test_ranks_evaluate_as_many_batches(num_samples: int, batch_size: int, world_size: int) -> None:
    """Ranks that share out a model wait for each other at each batch; none is empty."""
    orders = [
        EvaluationOrder(num_samples, batch_size, world_size, rank) for rank in range(world_size)
    ]
    counts = [[len(batch) for batch in order.micro_batches()] for order in orders]
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
    _, accumulation, world = split
    made = [
        [
            *TrainingOrder(1003, *split, r, 7, blocks=blocks_of(1003, at_once)).micro_batches(
                epoch, first
            )
        ]
        for r in range(world)
    ]
    return [
        torch.cat(
            [made[rank][i + part] for part in range(accumulation) for rank in range(world)]
        ).tolist()
        for i in range(0, len(made[0]), accumulation)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_order_by_blocks_does_not_depend_on_the_split(split: tuple[int, int, int]) -> None:
    """Each sample once, new in each epoch, and found from any update on."""
    for epoch in (0, 1):
        updates = by_blocks(split, epoch)
        assert updates == by_blocks(SPLITS[0], epoch)
        flat = [sample for update in updates for sample in update]
        assert len(flat) == len({*flat}) == 1003 // 24 * 24
        assert 0 <= min(flat) <= max(flat) < 1003
        assert by_blocks(split, epoch, first=17) == updates[17:]
    assert by_blocks(split, 0) != by_blocks(split, 1)


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_update_is_of_as_many_blocks_as_may_be_held(at_once: int) -> None:
    """And no more, but where a lane goes on to its next block."""
    ends = blocks_of(1003).sizes.cumsum()
    lanes = {1: 1, 7: 6, 64: 24}[at_once]  # which divide an update of 24
    counts = [
        len({*np.searchsorted(ends, u, side="right")}) for u in by_blocks(SPLITS[0], 0, 0, at_once)
    ]
    assert np.median(counts) <= lanes + 1
    assert np.median(counts) > lanes / 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_by_blocks_has_each_sample_once(world_size: int) -> None:
    """In stretches, of which ranks share no block but one."""
    ranks = [
        torch.cat(EvaluationOrder(67, 8, world_size, rank, blocks=blocks_of(67)).micro_batches())
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
    """As many batches of one size on all ranks; the mask has each sample once over all ranks."""
    lengths = lengths_of(num_samples) if grouped else None
    sizes, real = set(), []
    for rank in range(world_size):
        order = EvaluationOrder(num_samples, 4, world_size, rank, lengths)
        batches = order.equal_batches()
        sizes.add(tuple(len(batch) for batch in batches.samples))
        for samples, is_real in zip(*batches, strict=True):
            assert len(samples) == len(is_real) <= 4
            assert samples.max() < num_samples
            real += samples[is_real].tolist()
    assert len(sizes) == 1
    assert len(set(*sizes)) == 1
    assert sorted(real) == [*range(num_samples)]


def test_equal_batches_by_blocks_have_each_sample_once() -> None:
    """Where each rank reads a stretch of its own."""
    blocks = Blocks(np.array([5, 6, 6]), at_once=2)
    ranks = [EvaluationOrder(17, 4, 2, rank, blocks=blocks).equal_batches() for rank in (0, 1)]
    assert [len(batches.samples) for batches in ranks] == [3, 3]
    real = []
    for batches in ranks:
        for samples, is_real in zip(*batches, strict=True):
            real += samples[is_real].tolist()
    assert sorted(real) == [*range(17)]


def test_rehearsal_is_half_a_batch_and_the_same_samples_twice() -> None:
    """No batch is larger than an evaluation's; a rank without samples has none."""
    two = [torch.arange(9), torch.arange(9, 13)]
    assert [batch.tolist() for batch in rehearsal_batches(two, 9)] == [
        [0, 3, 6, 9],
        [0, 3, 6, 9] * 2,
    ]
    first = rehearsal_batches(two, 9, is_spread=False)
    assert [batch.tolist() for batch in first] == [[0, 1, 2, 3], [0, 1, 2, 3] * 2]
    assert [batch.tolist() for batch in rehearsal_batches([torch.arange(1)], 9)] == [[0], [0, 0]]
    assert [batch.tolist() for batch in rehearsal_batches([torch.arange(1)], 1)] == [[0]]
    assert rehearsal_batches([], 9) == []


def test_rehearsal_of_sorted_samples_has_all_classes() -> None:
    """Images lie in a folder for each class: the first batch is of one class alone."""
    labels = torch.arange(10).repeat_interleave(100)
    for rank in range(2):
        batches = EvaluationOrder(1000, 32, 2, rank).micro_batches()
        assert len(labels[batches[0]].unique()) < 10
        for samples in rehearsal_batches(batches, 32):
            assert len(labels[samples].unique()) == 10
            assert len(samples) <= 32
