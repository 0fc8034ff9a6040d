"""Batches in a resumable order, from memory of the device or from worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch

from common.runtime import local_world_size, usable_cores
from common.sampling import EvaluationOrder, TrainingOrder
from common.stopwatch import Work
from common.workers import WorkerBatches, fetched, moved

if TYPE_CHECKING:
    from accelerate import Accelerator

    from common.config import TrainingConfig

Batch = dict[str, torch.Tensor]
# Images are gathered this many bytes at a time and handed out in slices: one pass of few large
# operations costs less than one of small ones for each micro-batch, as long as a CPU's cache holds
# what they make.
GATHER_BYTES = 2 * 2**20


class Samples(Protocol):
    """A split that can make batches; see `common.images` and `common.text`."""

    num_bytes: int  # that its samples take in the memory of a device
    bytes_per_sample: int | None  # None where samples of a batch can't be cut from a larger one
    lengths_vary: bool  # of samples, as those of text do

    def __len__(self) -> int:
        """Return the number of samples."""

    def place(self, device: torch.device) -> None:
        """Copy all samples to `device`, for `gather`."""

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch from samples that were placed; augmented where `epoch` is given.

        Args:
            samples: int64 [batch], on the host.
        """

    def fetch(self, samples: torch.Tensor) -> Batch:
        """Make the raw batch on the host, in a worker process."""

    def finish(self, raw: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Turn what `fetch` made, moved to the device, into a batch."""

    def count(self, samples: torch.Tensor) -> Work:
        """Return how many samples and real tokens, without padding, these are."""

    def example(self, size: int, length: int) -> Batch:
        """Return a batch that has shapes only, on the meta device; `length` is that of text."""


def make_loaders(
    config: TrainingConfig, accelerator: Accelerator, splits: Mapping[str, Samples]
) -> dict[str, Loader]:
    """Return a loader for each split: training in a shuffled order, the others each sample once."""
    loaders = {}
    for name, samples in splits.items():
        common: dict[str, Any] = {
            "num_samples": len(samples),
            "batch_size": config.batch_size,
            "world_size": accelerator.num_processes,
            "rank": accelerator.process_index,
            "lengths": getattr(samples, "lengths", None),
        }
        order: TrainingOrder | EvaluationOrder = EvaluationOrder(**common)
        if name == "train":
            accumulation = config.gradient_accumulation_steps
            order = TrainingOrder(**common, accumulation=accumulation, seed=config.seed)
        placement, workers = config.data_placement, config.num_workers
        loaders[name] = Loader(samples, order, accelerator.device, placement, workers)
    return loaders


class Loader:
    """Yields the micro-batches of one split for this rank, already on the device."""

    def __init__(
        self,
        samples: Samples,
        order: TrainingOrder | EvaluationOrder,
        device: torch.device,
        placement: str = "auto",
        num_workers: int | None = None,
    ) -> None:
        """Choose where batches are made.

        Args:
            placement: ``device``: all samples lie in its memory and a batch is one gather;
                ``workers``: processes make batches on the host; ``auto``: the former if the
                samples take less than half of the memory that is free.
            num_workers: processes, where they are used; None for what the machine has.
        """
        self.samples = samples
        self.order = order
        self.device = device
        if placement == "auto":
            fits = samples.num_bytes < free_memory(device) / 2
            placement = "device" if fits else "workers"
        self.placement = placement
        if num_workers is None:
            num_workers = min(8, max(1, usable_cores() // local_world_size()))
        self.num_workers = num_workers if placement == "workers" else 0
        self.is_cut_short: Callable[[], bool] = lambda: False  # asked before each batch of `iter`
        if placement == "device":
            samples.place(device)

    def cut_into(self, batch_size: int, accumulation: int) -> None:
        """Cut the same order into micro-batches of another size."""
        if isinstance(self.order, TrainingOrder):
            self.order = replace(self.order, batch_size=batch_size, accumulation=accumulation)
        else:
            self.order = replace(self.order, batch_size=batch_size)

    @property
    def batches_per_gather(self) -> int:
        """How many batches are made at once."""
        size = self.samples.bytes_per_sample
        if size is None or self.placement == "workers":
            return 1
        return max(1, GATHER_BYTES // (size * self.order.batch_size))

    def batch_of(self, samples: torch.Tensor) -> Batch:
        """Make one batch of `samples` (int64 [batch], on the host), as in the first epoch."""
        if self.placement == "device":
            return self.samples.gather(samples, 0)
        raw = {name: values.to(self.device) for name, values in self.samples.fetch(samples).items()}
        return self.samples.finish(raw, samples.to(self.device), 0)

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch of an evaluation, until it is cut short."""
        assert isinstance(self.order, EvaluationOrder)
        for batch, _ in self.make_batches(self.order.micro_batches(), None):
            if self.is_cut_short():
                return
            yield batch

    def epoch(self, epoch: int, first_update: int = 0) -> Iterator[tuple[Batch, Work]]:
        """Yield (batch, what it holds) from an update of an epoch to its end."""
        assert isinstance(self.order, TrainingOrder)
        yield from self.make_batches(self.order.micro_batches(epoch, first_update), epoch)

    def make_batches(
        self, micro_batches: torch.Tensor | list[torch.Tensor], epoch: int | None
    ) -> Iterator[tuple[Batch, Work]]:
        """Yield a batch for each tensor of sample indices."""
        make = self.from_device if self.placement == "device" else self.from_workers
        for samples, batch in zip(micro_batches, make(micro_batches, epoch), strict=True):
            yield batch, self.samples.count(samples)

    def from_device(self, micro_batches: Any, epoch: int | None) -> Iterator[Batch]:
        """Gather batches from the device's memory, several at a time where that is possible."""
        per_gather = self.batches_per_gather
        for start in range(0, len(micro_batches), per_gather):
            group = micro_batches[start : start + per_gather]
            gathered = self.samples.gather(torch.cat(list(group)), epoch)
            if len(group) == 1:
                yield gathered
                continue
            parts = {name: values.split(self.order.batch_size) for name, values in gathered.items()}
            for position in range(len(group)):
                yield {name: split[position] for name, split in parts.items()}

    def from_workers(self, micro_batches: Any, epoch: int | None) -> Iterator[Batch]:
        """Have worker processes make batches, and move them while the one before is used."""
        fetch = WorkerBatches(self.samples.fetch, micro_batches)
        batches = moved(fetched(fetch, self.num_workers, self.device), self.device)
        for samples, batch in zip(micro_batches, batches, strict=True):
            yield self.samples.finish(batch, samples.to(self.device, non_blocking=True), epoch)


def free_memory(device: torch.device) -> int:
    """Return the free memory of `device`, in bytes; for a CPU, what this process may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
