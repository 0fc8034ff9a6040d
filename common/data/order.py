"""Which samples make up which batch: a pure function of seed, epoch and effective batch.

A position in an epoch is a number of samples of the global order, so it means the same on any
number of processes, and resuming is seeking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import UserError

# Text is sorted by length within this many global batches, whose order is then drawn: long enough
# that a batch has little padding, short enough that windows stay random.
WINDOW = 64
MOST_LANES = 64


class Blocks(NamedTuple):
    """Samples that are read together, as the row groups of parquet files."""

    sizes: np.ndarray  # int64 [blocks], in samples
    at_once: int  # how many may be held in memory


@dataclass(frozen=True)
class TrainingOrder:
    """The order of training samples, another in each epoch, cut into micro-batches of one rank.

    The last, incomplete global batch of an epoch is dropped: every update has the same weight.
    """

    num_samples: int
    batch_size: int
    accumulation: int
    world_size: int
    rank: int
    seed: int
    lengths: np.ndarray | None = None  # [num_samples], groups samples of like length if given
    blocks: Blocks | None = None  # of the samples, where they are read whole

    def __post_init__(self) -> None:
        if self.num_samples < self.global_batch:
            found = f"{self.num_samples:,} samples, fewer than the effective batch of"
            advice = "lower --batch-size or --gradient-accumulation-steps"
            raise UserError(f"the training split has {found} {self.global_batch:,}: {advice}")

    @property
    def global_batch(self) -> int:
        """Samples per optimizer update, over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    @property
    def updates_per_epoch(self) -> int:
        return self.num_samples // self.global_batch

    def micro_batches(self, epoch: int, first_update: int = 0) -> "torch.Tensor | BlockBatches":
        """Return this rank's samples: int64 [updates to the end × accumulation, batch_size]."""
        if self.blocks is not None:
            return BlockBatches(self, self.blocks, epoch, first_update)
        generator = torch.Generator().manual_seed(hash_integers(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        order = order[: self.updates_per_epoch * self.global_batch]
        if self.lengths is not None:
            lengths, grouped = torch.from_numpy(self.lengths), []
            for window in order.split(WINDOW * self.global_batch):
                batches = window[lengths[window].argsort(stable=True)].view(-1, self.global_batch)
                grouped.append(batches[torch.randperm(len(batches), generator=generator)].flatten())
            order = torch.cat(grouped)
        shape = (-1, self.accumulation, self.world_size, self.batch_size)
        return order.view(shape)[first_update:, :, self.rank].reshape(-1, self.batch_size)


class BlockBatches(Sequence[torch.Tensor]):
    """One rank's micro-batches of an epoch in which few blocks are read at a time.

    All blocks lie in a row, drawn anew in each epoch, as are the samples within each. The row is
    cut into equal lanes, and every global batch takes the next samples of each lane: so a batch is
    of as many blocks as there are lanes, a rank reads the lanes that are its share of the batch,
    and any update is found by arithmetic, whatever the number of processes.

    Against a permutation of all samples, those of one block come within one stretch of an epoch;
    against a shuffle buffer, nothing is lost or read again on a resume.
    """

    def __init__(self, order: TrainingOrder, blocks: Blocks, epoch: int, first_update: int) -> None:
        self.order, self.epoch, self.sizes = order, epoch, np.asarray(blocks.sizes)
        self.first = first_update * order.accumulation
        most = min(MOST_LANES, blocks.at_once)
        self.lanes = max(n for n in range(1, most + 1) if order.global_batch % n == 0)
        self.row = shuffled(len(self.sizes), order.seed, epoch)
        self.ends, self.starts = self.sizes[self.row].cumsum(), self.sizes.cumsum() - self.sizes

    def __len__(self) -> int:
        return self.order.updates_per_epoch * self.order.accumulation - self.first

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        order = self.order
        update, part = divmod(self.first + index, order.accumulation)
        start = (part * order.world_size + order.rank) * order.batch_size
        share = order.global_batch // self.lanes  # of each lane in a global batch
        lane, within = np.divmod(np.arange(start, start + order.batch_size), share)
        place = (lane * order.updates_per_epoch + update) * share + within
        samples, spot = np.empty_like(place), np.searchsorted(self.ends, place, side="right")
        for number in np.unique(spot):
            block, here = self.row[number], spot == number
            inside = place[here] - self.ends[number] + self.sizes[block]
            mixed = shuffled(int(self.sizes[block]), order.seed, self.epoch, int(block))
            samples[here] = self.starts[block] + mixed[inside]
        return torch.from_numpy(samples)


@lru_cache(2 * MOST_LANES)
def shuffled(count: int, *seeds: int) -> np.ndarray:
    return np.random.default_rng(hash_integers(*seeds)).permutation(count)


@dataclass(frozen=True)
class EvaluationOrder:
    """Every sample exactly once over all ranks; batches of one rank differ by at most one."""

    num_samples: int
    batch_size: int
    world_size: int
    rank: int
    lengths: np.ndarray | None = None
    blocks: Blocks | None = None

    @property
    def most_batches(self) -> int:
        """Batches of a rank, where it has that many samples."""
        return -(-self.num_samples // (self.world_size * self.batch_size))

    def micro_batches(self) -> list[torch.Tensor]:
        """Return this rank's samples: int64 tensors of at most `batch_size`."""
        order = torch.arange(self.num_samples)
        if self.lengths is not None:
            order = torch.from_numpy(np.argsort(self.lengths, kind="stable"))
        mine = order[self.rank :: self.world_size]
        if self.blocks is not None:  # none of which two ranks should read
            mine = order.tensor_split(self.world_size)[self.rank]
        batches = list(mine.split(self.batch_size)) if len(mine) else []
        # As many on all ranks, as those that share out a model wait for each other at each.
        if 0 < len(batches) < self.most_batches and len(batches[-1]) > 1:
            batches[-1:] = batches[-1].tensor_split(2)
        return batches

    def equal_batches(self) -> "EqualBatches":
        """Return as many batches of one size on all ranks, filled up with samples that repeat."""
        most_samples = -(-self.num_samples // self.world_size)  # of a rank
        size = min(self.batch_size, most_samples)
        mine = self.micro_batches()
        samples = torch.cat(mine) if mine else torch.zeros(0, dtype=torch.long)
        count = -(-most_samples // size)
        padding = count * size - len(samples)
        repeated = samples[-1:] if len(samples) else torch.zeros(1, dtype=torch.long)
        is_real = torch.arange(count * size) < len(samples)
        filled = torch.cat([samples, repeated.expand(padding)])
        return EqualBatches([*filled.split(size)], [*is_real.split(size)])


class EqualBatches(NamedTuple):
    """The samples of each batch of a rank, int64 [size], and which of them count, bool [size]."""

    samples: list[torch.Tensor]
    is_real: list[torch.Tensor]


def rehearsal_batches(
    batches: Sequence[torch.Tensor], batch_size: int, is_spread: bool = True
) -> list[torch.Tensor]:
    """Return one batch of a rank, and another with its samples twice, where they fit into one.

    They have half as many samples as the rank's first batch, so that no batch is larger than an
    evaluation's. A total doubles with the samples, and a mean does not: so that the two can be told
    apart. Samples may be sorted, as images are that lie in a folder for each class, and a figure
    such as the area under a curve needs several classes: so the few are spread over all.

    Args:
        batches: of the rank: sample numbers, or anything else that there is one of for each sample.
        is_spread: false takes the rank's first samples, where reading others is slow.
    """
    if not len(batches):
        return []
    size = max(1, len(batches[0]) // 2)
    first = batches[0][:size]
    if is_spread:
        samples = torch.cat([*batches])
        first = samples[torch.arange(size) * len(samples) // size]
    return [first, torch.cat([first, first])] if batch_size > 1 else [first]


def hash_integers(*values: int) -> int:
    """Mix integers into one of 63 bits, so that near values give unrelated random streams."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def random_bits(seed: int, epoch: int, samples: torch.Tensor) -> torch.Tensor:
    """Return 31 random bits for each of `samples` (int64 [batch]): MurmurHash3's finaliser."""
    bits = samples * 0x9E3779B1 + hash_integers(seed, epoch, 1) % 2**31
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ bits >> 16) * multiplier
    return (bits & 0xFFFFFFFF) >> 1
