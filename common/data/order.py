"""Which samples make up which batch: a pure function of seed, epoch and effective batch.

A position in an epoch is a number of samples of the global order, so it means the same on any
number of processes, and resuming is seeking.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UserError

# Text is sorted by length within this many global batches, whose order is then drawn: long enough
# that a batch has little padding, short enough that windows stay random.
WINDOW = 64


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

    def __post_init__(self) -> None:
        if self.num_samples < self.global_batch:
            raise UserError(
                f"the training split has {self.num_samples:,} samples, fewer than the effective "
                f"batch of {self.global_batch:,}: lower --batch-size or "
                "--gradient-accumulation-steps"
            )

    @property
    def global_batch(self) -> int:
        """Samples per optimizer update, over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    @property
    def updates_per_epoch(self) -> int:
        return self.num_samples // self.global_batch

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor:
        """Return this rank's samples: int64 [updates to the end × accumulation, batch_size]."""
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


@dataclass(frozen=True)
class EvaluationOrder:
    """Every sample exactly once over all ranks; batches of one rank differ by at most one."""

    num_samples: int
    batch_size: int
    world_size: int
    rank: int
    lengths: np.ndarray | None = None

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
        batches = list(mine.split(self.batch_size)) if len(mine) else []
        # As many on all ranks, as those that share out a model wait for each other at each.
        if 0 < len(batches) < self.most_batches and len(batches[-1]) > 1:
            batches[-1:] = batches[-1].tensor_split(2)
        return batches


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
