"""Batches in a resumable order, from memory of the device or from worker processes."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils import _pytree as tree

from common.config import TrainingConfig
from common.data.batch import Batch, Samples, Work
from common.data.iterable import IterableOrder, IterableSamples
from common.data.order import EvaluationOrder, TrainingOrder, rehearsal_batches
from common.data.workers import MicroBatches, Workers
from common.devices import is_accelerator, memory_room
from common.errors import UserError
from common.machine import local_world_size, usable_cores

# Images are gathered this many bytes at a time and handed out in slices: one pass of few large
# operations costs less than one of small ones for each micro-batch, as long as a CPU's cache holds
# what they make. On a GPU the more the better; this much is a small part of its memory (not tried).
GATHER_BYTES_OF_CPU = 2 * 2**20
GATHER_BYTES_OF_ACCELERATOR = 32 * 2**20


class Loader:
    """Yields the micro-batches of one split for this rank, already on the device."""

    def __init__(
        self,
        samples: Samples,
        order: TrainingOrder | EvaluationOrder,
        device: torch.device,
        placement: str = "auto",
        num_workers: int | None = None,
        seed: int = 0,
        room: float | None = None,
    ) -> None:
        """Choose where batches are made, and place the samples.

        On the ``device``, in whose memory they lie, as with ``auto`` if they take less bytes than
        `room`, by default half of what is free; or by ``workers``: as many processes, this one for
        0, by default by the cores.
        """
        self.samples, self.order, self.device = samples, order, device
        size, free = samples.num_bytes, free_memory(device)
        if placement == "device" and (size is None or (is_accelerator(device) and size > free)):
            what = "samples are made one by one and can't lie in the device's memory"
            if size is not None:
                what = f"samples take {size / 2**20:,.0f} MiB, and {free / 2**20:,.0f} are free"
            advice = "pass workers, or leave it out"
            raise UserError(f"--data-placement device: this recipe's {what}: {advice}")
        if placement == "auto":
            fits = size is not None and size < (free / 2 if room is None else room)
            placement = "device" if fits else "workers"
        if num_workers is None:
            num_workers = min(8, max(1, usable_cores() // local_world_size()))
            if samples.blocks is not None:
                num_workers = 1  # which has threads: each would read all blocks
        if isinstance(samples, IterableSamples):
            num_workers = min(1, num_workers)  # its position is one
        self.placement, self.num_workers = placement, num_workers if placement == "workers" else 0
        self.workers = Workers(samples, self.num_workers, device)
        self.is_cut_short: Callable[[], bool] = lambda: False  # asked before each batch of `iter`
        self.is_rehearsed: Callable[[], bool] = lambda: False  # whether an evaluation is, by `Run`
        samples.seed = seed
        if placement == "device":
            samples.place(device)
        self.placed_bytes = (size or 0) if placement == "device" else 0

    def cut_into(self, batch_size: int, accumulation: int) -> None:
        """Cut the same order into micro-batches of another size."""
        changes = {"batch_size": batch_size}
        if isinstance(self.order, TrainingOrder):
            changes["accumulation"] = accumulation
        self.order = replace(self.order, **changes)  # type: ignore[arg-type]

    @property
    def batches_per_gather(self) -> int:
        """How many batches are made at once; of text, one, as each has a length of its own."""
        size = self.samples.num_bytes
        if self.placement == "workers" or self.samples.lengths is not None or not size:
            return 1
        on_accelerator = is_accelerator(self.device)
        most = GATHER_BYTES_OF_ACCELERATOR if on_accelerator else GATHER_BYTES_OF_CPU
        return max(1, most * len(self.samples) // (size * self.order.batch_size))

    def batch_of(self, samples: torch.Tensor) -> Batch:
        """Make one batch of `samples` (int64 [batch], on the host), as in the first epoch."""
        if self.placement == "device":
            return self.samples.gather(samples, 0)
        batch = send_to_device(self.samples.read(samples, 0), self.device)
        return self.samples.finish(batch, samples, 0)

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch of an evaluation, until it is cut short."""
        assert isinstance(self.order, EvaluationOrder)
        if self.is_rehearsed():
            yield from self.rehearsed(self.rehearsal_of(self.order.micro_batches()))
            return
        for batch, _ in self.make_batches(self.order.micro_batches(), None):
            if self.is_cut_short():
                return
            yield batch

    def equal_batches(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield as many batches of one size on all ranks, each with which samples count.

        The second is bool [size], on the device: false for a sample that only fills a batch up. A
        request to stop does not cut it short, as ranks that talk to each other within an evaluation
        would wait for each other.
        """
        assert isinstance(self.order, EvaluationOrder)
        samples, is_real = self.order.equal_batches()
        if self.is_rehearsed():
            batches = self.rehearsed(self.rehearsal_of(samples))
            is_real = self.rehearsal_of(is_real)
        else:
            batches = (batch for batch, _ in self.make_batches(samples, None))
        for batch, counts in zip(batches, is_real, strict=True):
            yield batch, counts.to(self.device)

    def rehearsal_of(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a rehearsal's batches; of blocks, which are read whole, only the first."""
        is_spread = self.samples.blocks is None
        return rehearsal_batches(batches, self.order.batch_size, is_spread)

    def rehearsed(self, micro_batches: list[torch.Tensor]) -> Iterator[Batch]:
        """Yield a few batches as an evaluation would, and leave no workers behind."""
        had_workers = self.workers.have_begun
        try:
            for batch, _ in self.make_batches(micro_batches, None):
                yield batch
        finally:
            if not had_workers:
                self.workers.close()

    def epoch(self, epoch: int, first_update: int = 0) -> Iterator[tuple[Batch, Work]]:
        """Yield (batch, what it holds) from an update of an epoch to its end."""
        assert isinstance(self.order, TrainingOrder)
        if self.placement == "workers":
            yield from self.make_batches(self.order.micro_batches(epoch, first_update), epoch)
        else:
            first = first_update * self.order.accumulation
            yield from self.make_batches(self.order.micro_batches(epoch), epoch, first)

    def close(self) -> None:
        """Let the workers end, if there are any."""
        self.workers.close()

    def make_batches(
        self, micro_batches: MicroBatches, epoch: int | None, first: int = 0
    ) -> Iterator[tuple[Batch, Work]]:
        """Yield a batch for each tensor of sample indices, on the device from number `first`."""
        if self.placement == "device":
            batches = self.gathered(micro_batches, epoch, first)
            micro_batches = micro_batches[first:]
        else:
            batches = self.workers.batches(micro_batches, epoch)
        for samples, batch in zip(micro_batches, batches, strict=True):
            is_short = epoch is None and len(samples) < self.order.batch_size
            with without_tuning() if is_short else nullcontext():
                yield batch, self.samples.work_of(batch, samples)

    def gathered(
        self, micro_batches: MicroBatches, epoch: int | None, first: int
    ) -> Iterator[Batch]:
        """Gather batches from the device's memory, several at a time where that is possible.

        Which ones are gathered together does not depend on where a resumed run begins. The last
        bits of a result may depend on how a batch is aligned in memory.
        """
        per_gather = self.batches_per_gather
        for start in range(first - first % per_gather, len(micro_batches), per_gather):
            group = micro_batches[start : start + per_gather]
            gathered = self.samples.gather(torch.cat(list(group)), epoch)
            if len(group) == 1:
                yield gathered
                continue
            leaves, structure = tree.tree_flatten(gathered)
            sizes = [*map(len, group)]
            split = zip(*(values.split(sizes) for values in leaves), strict=True)
            for number, parts in enumerate(split, start):
                if number >= first:
                    yield tree.tree_unflatten(parts, structure)


@contextmanager
def without_tuning() -> Iterator[None]:
    """Have cuDNN take kernels that it has tried before, or that it expects to be fast.

    Otherwise it would try all its kernels for a batch size that comes once in an evaluation.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def make_loaders(
    config: TrainingConfig, accelerator: Accelerator, splits: Mapping[str, Samples]
) -> dict[str, Loader]:
    """Return a loader for each split: training in a shuffled order, the others each sample once."""
    ranks = accelerator.num_processes, accelerator.process_index
    where = accelerator.device, config.data_placement, config.num_workers
    cut = config.batch_size, config.gradient_accumulation_steps, *ranks
    loaders, room = {}, free_memory(accelerator.device) / 2  # for all splits together
    # A rank that gets no batch says so before the others give up their wait for this rank.
    patience = config.collective_timeout * (1.0 if ranks[0] == 1 else 0.9)
    for name, samples in splits.items():
        order: TrainingOrder | EvaluationOrder
        grouped = samples.lengths if samples.blocks is None else None, samples.blocks
        if isinstance(samples, IterableSamples):
            if config.max_steps is None or config.auto_batch_size or name != "train":
                advice = "pass --max-steps, leave --auto-batch-size out, and evaluate on others"
                raise UserError(f"an IterableDataset says no number of samples: {advice}")
            order = IterableOrder(config.max_steps * math.prod(cut[:3]), *cut, config.seed)
        elif name == "train":
            if config.evaluate_only:  # which few samples allow as well
                cut = min(cut[0], max(1, len(samples) // math.prod(cut[1:3]))), *cut[1:]
            order = TrainingOrder(len(samples), *cut, config.seed, *grouped)
        else:
            order = EvaluationOrder(len(samples), config.batch_size, *ranks, *grouped)
            if getattr(accelerator, "mesh", None) and len(samples) // ranks[0] < order.most_batches:
                what = "ranks that share out a model evaluate as many batches each"
                advice = "pass a larger --batch-size, or fewer processes"
                raise UserError(f"{what}, and {name} has {len(samples):,} samples: {advice}")
        loaders[name] = Loader(samples, order, *where, config.seed, room)
        loaders[name].workers.patience = patience
        room -= loaders[name].placed_bytes
    return loaders


def free_memory(device: torch.device) -> int:
    """Return the free memory of `device`, in bytes.

    For a CPU, and for a device that doesn't say, it is what this process may still take.
    """
    room = memory_room(device)
    if room is not None:
        return room[0]
    try:
        return psutil.virtual_memory().available
    except (OSError, psutil.Error):  # without /proc
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
