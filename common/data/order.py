"""The order of samples: which samples make up which batch of which rank.

For given data, the order depends only on the seed, the epoch and the samples per update. A position
in an epoch is a number of updates. It means the same for any number of processes, so a resumed run
finds its next samples by arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from common.errors import UserError
from common.system.wording import counted

# Text is sorted by length within windows of this many global batches, and the batches of a window
# are then shuffled. A longer window means less padding, and a shorter one means more randomness.
WINDOW = 64
MAX_LANES = 64  # see `BlockBatches`


class Blocks(NamedTuple):
    """Blocks of samples that are read together, such as the row groups of parquet files."""

    sizes: np.ndarray  # samples of each block: int64 [blocks]
    at_once: int  # how many blocks may be in memory at a time


@dataclass(frozen=True)
class TrainingOrder:
    """The order of training samples, new in each epoch, cut into the micro-batches of one rank.

    A global batch is the samples of one update, over all ranks. The last global batch of an epoch
    is dropped if it is incomplete, so that every update has the same weight.

    Raises:
        UserError: there are too few samples for one update.
    """

    num_samples: int
    batch_size: int  # samples of a micro-batch of one rank
    accumulation: int  # micro-batches per update
    world_size: int
    rank: int
    seed: int
    # int64 [samples]. If it is set, the samples of a global batch have similar lengths.
    lengths: np.ndarray | None = None
    blocks: Blocks | None = None  # if it is set, each batch has samples of few blocks

    def __post_init__(self) -> None:
        if self.num_samples < self.global_batch:
            raise UserError(
                (
                    f"the training split has {counted(self.num_samples, 'sample')}, fewer than the "
                    f"{self.global_batch:,} samples of one update"
                ),
                advice=(
                    "lower --batch-size, --gradient-accumulation-steps or --effective-batch-size, "
                    "or start fewer processes"
                ),
            )

    @property
    def global_batch(self) -> int:
        """Samples per optimizer update, over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    @property
    def updates_per_epoch(self) -> int:
        return self.num_samples // self.global_batch

    def micro_batches(self, epoch: int, first_update: int = 0) -> "torch.Tensor | BlockBatches":
        """Return the sample indices of this rank from an update to the end of an epoch.

        Args:
            first_update: the number of the first update in the epoch, from 0.

        Returns:
            int64 [micro-batches, batch_size]; with `blocks`, a sequence of int64 [batch_size].
        """
        if self.blocks is not None:
            return BlockBatches(self, self.blocks, epoch, first_update)
        generator = torch.Generator().manual_seed(hash_integers(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        order = order[: self.updates_per_epoch * self.global_batch]
        if self.lengths is not None:
            order = self.grouped_by_length(order, torch.from_numpy(self.lengths), generator)
        # The four dimensions are the update, the micro-batch, the rank and the sample.
        shape = (-1, self.accumulation, self.world_size, self.batch_size)
        return order.view(shape)[first_update:, :, self.rank].reshape(-1, self.batch_size)

    def grouped_by_length(
        self, order: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Reorder samples so that each global batch has samples of similar length.

        Such batches need little padding. A sample stays in its window (see `WINDOW`), and the order
        of the batches in a window is random.

        Args:
            order: int64 [updates × global_batch], sample indices.
            lengths: int64 [samples], by sample index.
            generator: shuffles the global batches of each window.
        """
        windows = []
        for window in order.split(WINDOW * self.global_batch):
            by_length = window[lengths[window].argsort(stable=True)]
            batches = by_length.view(-1, self.global_batch)
            shuffled_batches = batches[torch.randperm(len(batches), generator=generator)]
            windows.append(shuffled_batches.flatten())
        return torch.cat(windows)


class BlockBatches(Sequence[torch.Tensor]):
    """The micro-batches of one rank in an epoch, from few blocks at a time.

    Each epoch shuffles the order of the blocks, and the samples of each block. The places of all
    samples in this order are cut into lanes of equally many places. Every global batch takes the
    next samples of each lane, equally many from each.

    So a global batch has samples of about as many blocks as there are lanes, and each rank reads
    only the lanes of its share of the batch. The samples of any update follow from arithmetic,
    whatever the number of processes.

    Two simpler orders do not work. In a permutation of all samples, those of one block would be
    spread over the whole epoch, and all blocks would be read again and again. A shuffle buffer
    would lose samples on a resume, or read them again.
    """

    def __init__(self, order: TrainingOrder, blocks: Blocks, epoch: int, first_update: int) -> None:
        """Prepare the micro-batches from `first_update` to the end of `epoch`."""
        self.order = order
        self.epoch = epoch
        self.sizes = np.asarray(blocks.sizes)
        self.first = first_update * order.accumulation  # number of the first micro-batch
        most_lanes = min(MAX_LANES, blocks.at_once)
        # The largest number of lanes that divides the global batch, so that each lane gives equally
        # many samples.
        self.lanes = max(n for n in range(1, most_lanes + 1) if order.global_batch % n == 0)
        self.block_order = shuffled(len(self.sizes), order.seed, epoch)  # the numbers of the blocks
        # The number of samples up to the end of each block in this order.
        self.ends = self.sizes[self.block_order].cumsum()
        self.starts = self.sizes.cumsum() - self.sizes  # the first sample index of each block

    def __len__(self) -> int:
        """Return the number of micro-batches from the first update to the end of the epoch."""
        return self.order.updates_per_epoch * self.order.accumulation - self.first

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # takes no slices
        """Return the sample indices of a micro-batch, int64 [batch_size].

        Raises:
            IndexError: there is no such micro-batch, which ends a loop over this sequence.
        """
        if index >= len(self):
            raise IndexError(index)
        return torch.from_numpy(self.indices_at(self.places_of(self.first + index)))

    def places_of(self, number: int) -> np.ndarray:
        """Return the places of a micro-batch in the order of all samples, int64 [batch_size].

        Args:
            number: the number of the micro-batch in the epoch.
        """
        order = self.order
        update, micro_batch = divmod(number, order.accumulation)
        # The positions of this micro-batch's samples in the global batch. They determine the lanes.
        start = (micro_batch * order.world_size + order.rank) * order.batch_size
        positions = np.arange(start, start + order.batch_size)
        samples_per_lane = order.global_batch // self.lanes
        lane, place_in_lane = np.divmod(positions, samples_per_lane)
        # Each lane has updates_per_epoch * samples_per_lane places.
        return (lane * order.updates_per_epoch + update) * samples_per_lane + place_in_lane

    def indices_at(self, places: np.ndarray) -> np.ndarray:
        """Return the indices of the samples at some places in the order, int64 [places]."""
        indices = np.empty_like(places)
        # For each place, the position in `block_order` of its block.
        block_positions = np.searchsorted(self.ends, places, side="right")
        for position in np.unique(block_positions):
            block = int(self.block_order[position])
            size = int(self.sizes[block])
            first_place = self.ends[position] - size  # of the block
            is_in_block = block_positions == position
            offsets = places[is_in_block] - first_place
            shuffled_offsets = shuffled(size, self.order.seed, self.epoch, block)[offsets]
            indices[is_in_block] = self.starts[block] + shuffled_offsets
        return indices


@lru_cache(2 * MAX_LANES)
def shuffled(count: int, *seeds: int) -> np.ndarray:
    """Return the numbers below `count` in an order that depends on the seeds: int64 [count].

    Neighbouring batches need the same orders, so the arrays are cached. Callers must not change
    them.
    """
    return np.random.default_rng(hash_integers(*seeds)).permutation(count)


@dataclass(frozen=True)
class EvaluationOrder:
    """The order of an evaluation: every sample exactly once over all ranks.

    The numbers of samples of two ranks differ by one at most.
    """

    num_samples: int
    batch_size: int  # samples of a batch of one rank
    world_size: int
    rank: int
    lengths: np.ndarray | None  # int64 [samples]; if it is set, samples are sorted
    blocks: Blocks | None = None  # if it is set, each rank gets consecutive samples

    @property
    def most_batches(self) -> int:
        """The number of batches of the rank that has the most batches.

        The ranks of a sharded model need this many batches each: see `batches`.
        """
        return -(-self.num_samples // (self.world_size * self.batch_size))

    def batches(self) -> list[torch.Tensor]:
        """Return the sample indices of this rank: int64 tensors of at most `batch_size`.

        With `lengths`, they are sorted by length, so that batches have little padding.

        All ranks have the same number of batches, except for ranks that have too few samples.
        """
        order = torch.arange(self.num_samples)
        if self.lengths is not None:
            order = torch.from_numpy(np.argsort(self.lengths, kind="stable"))
        if self.blocks is None:
            own_indices = order[self.rank :: self.world_size]
        else:
            # A rank gets consecutive samples, so that it shares at most two blocks with others.
            own_indices = order.tensor_split(self.world_size)[self.rank]
        batches = list(own_indices.split(self.batch_size)) if len(own_indices) else []
        # The ranks of a sharded model wait for each other in each batch, so all need the same
        # number of batches. A rank with one sample fewer may have one batch fewer. Its last batch
        # is then cut in two.
        if 0 < len(batches) < self.most_batches and len(batches[-1]) > 1:
            batches[-1:] = batches[-1].tensor_split(2)
        return batches

    def equal_batches(self) -> "EqualBatches":
        """Return the same number of batches of the same size on all ranks.

        An evaluation needs them if the ranks exchange values within each batch.

        The last batches are filled up with repetitions of the rank's last sample, which must not
        count. A rank without any sample repeats sample 0.
        """
        most_samples = -(-self.num_samples // self.world_size)  # of one rank
        size = min(self.batch_size, most_samples)
        batches = self.batches()
        indices = torch.cat(batches) if batches else torch.zeros(0, dtype=torch.long)
        count = -(-most_samples // size)
        is_real = torch.arange(count * size) < len(indices)
        last_index = int(indices[-1]) if batches else 0
        filled = F.pad(indices, (0, count * size - len(indices)), value=last_index)
        return EqualBatches(list(filled.split(size)), list(is_real.split(size)))


class EqualBatches(NamedTuple):
    """The batches of one rank, all of the same size."""

    indices: list[torch.Tensor]  # those of the samples of each batch: int64 [size]
    is_real: list[torch.Tensor]  # which samples of each batch count: bool [size]


def rehearsal_batches(
    batches: Sequence[torch.Tensor], batch_size: int, is_spread: bool
) -> list[torch.Tensor]:
    """Return a few batches with which a run tries out an evaluation before it trains.

    The result is a small batch, and a second one with the same samples twice. The second one is
    left out if `batch_size` is 1. A total is twice as large for the second batch, and a mean is the
    same for both. So the run can tell totals and means apart.

    The small batch has half as many samples as the rank's first batch, so that no batch is larger
    than in an evaluation. Its samples come from the whole split, because samples may be sorted by
    class, and figures such as the area under a curve need several classes.

    Args:
        batches: the batches of the rank: sample indices, or other values, one per sample.
        is_spread: whether the samples come from the whole split. If not, they are the first ones,
            for a split in which it is slow to read others.

    Returns:
        An empty list if the rank has no batches.
    """
    if not len(batches):
        return []
    size = max(1, len(batches[0]) // 2)
    first = batches[0][:size]
    if is_spread:
        values = torch.cat(list(batches))
        first = values[torch.arange(size) * len(values) // size]
    if batch_size == 1:
        return [first]
    return [first, torch.cat([first, first])]


def hash_integers(*values: int) -> int:
    """Mix integers into one integer of 63 bits, to seed a random generator.

    The generators of neighbouring epochs, blocks and samples then give unrelated random numbers,
    although the integers are nearly the same. The mixing function is that of SplitMix64.
    """
    state = 0
    for value in values:
        # The masks keep 64 bits, as the arithmetic of a 64-bit register would.
        state = ((state ^ value) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1  # 63 bits fit into an int64


def random_bits(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Return 31 random bits for each sample of a batch.

    The bits depend only on the seed, the epoch and the sample's index. So a sample is augmented in
    the same way in any rank and batch.

    The mixing is a shorter form of the finaliser of MurmurHash3: its two multiplications, with a
    shift by 16 bits before each.

    Args:
        indices: those of the samples, int64 [batch].

    Returns:
        int64 [batch], from 0 to 2**31 - 1.
    """
    # The third value, 1, makes the seed differ from that of the order of the epoch.
    bits = indices * 0x9E3779B1 + hash_integers(seed, epoch, 1) % 2**31
    # The masks keep 32 bits, for which these multipliers were chosen.
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ (bits >> 16)) * multiplier
    return (bits & 0xFFFFFFFF) >> 1
