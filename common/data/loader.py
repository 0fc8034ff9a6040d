"""Batches in a resumable order, from memory of the device or from worker processes."""

import atexit
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from mmap import mmap
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from torch.utils import _pytree as tree
from torch.utils.data import DataLoader

from common.config import TrainingConfig
from common.data.batch import Batch, Samples, Work
from common.data.iterable import IterableOrder, IterableSamples
from common.data.order import EvaluationOrder, TrainingOrder
from common.errors import LostProcessError, UserError
from common.machine import STOP_SIGNALS, local_world_size, usable_cores

# Images are gathered this many bytes at a time and handed out in slices: one pass of few large
# operations costs less than one of small ones for each micro-batch, as long as a CPU's cache holds
# what they make. On a GPU the more the better; this much is a small part of its memory (not tried).
GATHER_BYTES = {"cpu": 2 * 2**20, "cuda": 32 * 2**20}
GONE = "DataLoader worker (pid"  # as it says that one was killed, or has exited
MicroBatches = Sequence[torch.Tensor] | torch.Tensor


class Mistake(NamedTuple):
    """A `UserError`, which would end a worker, in place of a batch."""

    message: str
    resumable: bool


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
        if placement == "device" and (size is None or (device.type == "cuda" and size > free)):
            what = "samples are made one by one and can't lie in the device's memory"
            if size is not None:
                what = f"samples take {size / 2**20:,.0f} MiB, and {free / 2**20:,.0f} are free"
            raise UserError(
                f"--data-placement device: this recipe's {what}: pass workers, or leave it out"
            )
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
        self.is_cut_short: Callable[[], bool] = lambda: False  # asked before each batch of `iter`
        self.asked = Asked()
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
        most = GATHER_BYTES.get(self.device.type, 0)
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
        for batch, _ in self.make_batches(self.order.micro_batches(), None):
            if self.is_cut_short():
                return
            yield batch

    def epoch(self, epoch: int, first_update: int = 0) -> Iterator[tuple[Batch, Work]]:
        """Yield (batch, what it holds) from an update of an epoch to its end."""
        assert isinstance(self.order, TrainingOrder)
        yield from self.make_batches(self.order.micro_batches(epoch, first_update), epoch)

    def make_batches(
        self, micro_batches: MicroBatches, epoch: int | None
    ) -> Iterator[tuple[Batch, Work]]:
        """Yield a batch for each tensor of sample indices."""
        make = self.from_device if self.placement == "device" else self.from_workers
        for samples, batch in zip(micro_batches, make(micro_batches, epoch), strict=True):
            yield batch, self.samples.count(samples)

    def from_device(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Gather batches from the device's memory, several at a time where that is possible."""
        per_gather = self.batches_per_gather
        for start in range(0, len(micro_batches), per_gather):
            group = micro_batches[start : start + per_gather]
            gathered = self.samples.gather(torch.cat(list(group)), epoch)
            if len(group) == 1:
                yield gathered
                continue
            leaves, structure = tree.tree_flatten(gathered)
            sizes = [*map(len, group)]
            for parts in zip(*(values.split(sizes) for values in leaves), strict=True):
                yield tree.tree_unflatten(parts, structure)

    def from_workers(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Have worker processes make batches, and move them while the one before is used."""
        batches = moved(self.fetched(micro_batches, epoch), self.device)
        for samples, batch in zip(micro_batches, batches, strict=True):
            yield self.samples.finish(batch, samples, epoch)

    @cached_property
    def workers(self) -> DataLoader[Any]:
        """The processes that make batches, from the first one to `close`."""
        atexit.register(kill_workers)  # Python would wait for them, and they ignore SIGTERM
        ForkingPickler.register(np.memmap, by_path)
        return DataLoader(
            Reader(self.samples),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.asked,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=as_it_is,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=ignore_stop_signals,
            # Its own generator: making an iterator must not draw from the one of dropout.
            generator=torch.Generator(),
        )

    def close(self) -> None:
        """Let the workers end, if there are any."""
        vars(self).pop("workers", None)

    def fetched(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order as workers make them, in pinned memory for CUDA."""
        self.asked.micro_batches, self.asked.epoch = micro_batches, epoch
        try:
            for batch in self.workers:
                if isinstance(batch, Mistake):
                    message, resumable = batch
                    raise UserError(message, every_rank=True, resumable=resumable)
                yield batch
        except Exception as error:
            self.close()
            if self.num_workers == 0:
                raise
            kill_workers()
            words = str(error).strip()
            is_lost = GONE in words or isinstance(error, (ConnectionError, EOFError))
            # What a data set raises in a worker says that it was caught there.
            if is_lost and not words.startswith("Caught"):
                raise LostProcessError(f"a worker of the loader is gone ({words})") from error
            raise


@dataclass
class Asked:
    """What workers are asked for next: the samples of each batch, and their epoch."""

    micro_batches: MicroBatches = ()
    epoch: int | None = None

    def __iter__(self) -> Iterator[tuple[np.ndarray, int | None]]:
        return ((samples.numpy(), self.epoch) for samples in self.micro_batches)


@dataclass
class Reader:
    """What a worker has of a loader, as it was when the first batch was asked for."""

    samples: Samples

    def __getitem__(self, asked: tuple[np.ndarray, int | None]) -> Batch:
        try:
            return self.samples.read(torch.from_numpy(asked[0]), asked[1])
        except UserError as error:
            return Mistake(error.message, error.resumable)


def as_it_is(batch: Batch) -> Batch:
    return batch


def by_path(mapped: np.memmap) -> tuple[Any, ...]:
    """Let another process open a memory map itself: it would be sent what the file holds."""
    if not isinstance(mapped.base, mmap):  # a part of one, whose place in the file is not known
        return np.array, (np.asarray(mapped),)
    order: Any = "C" if mapped.flags.c_contiguous else "F"
    mode: Any = mapped.mode.replace("w+", "r+")
    return np.memmap, (mapped.filename, mapped.dtype, mode, mapped.offset, mapped.shape, order)


def make_loaders(
    config: TrainingConfig, accelerator: Accelerator, splits: Mapping[str, Samples]
) -> dict[str, Loader]:
    """Return a loader for each split: training in a shuffled order, the others each sample once."""
    ranks = accelerator.num_processes, accelerator.process_index
    where = accelerator.device, config.data_placement, config.num_workers
    loaders, room = {}, free_memory(accelerator.device) / 2  # for all splits together
    for name, samples in splits.items():
        order: TrainingOrder | EvaluationOrder
        grouped = samples.lengths if samples.blocks is None else None, samples.blocks
        if isinstance(samples, IterableSamples):
            if config.max_steps is None or config.auto_batch_size or name != "train":
                advice = "pass --max-steps, leave --auto-batch-size out, and evaluate on others"
                raise UserError(f"an IterableDataset says no number of samples: {advice}")
            cut = config.batch_size, config.gradient_accumulation_steps, *ranks
            order = IterableOrder(config.max_steps * math.prod(cut[:3]), *cut, config.seed)
        elif name == "train":
            cut = config.batch_size, config.gradient_accumulation_steps, *ranks
            order = TrainingOrder(len(samples), *cut, config.seed, *grouped)
        else:
            order = EvaluationOrder(len(samples), config.batch_size, *ranks, *grouped)
            if getattr(accelerator, "mesh", None) and len(samples) // ranks[0] < order.most_batches:
                raise UserError(
                    f"ranks that share out a model evaluate as many batches each, and {name} has "
                    f"{len(samples):,} samples: pass a larger --batch-size, or fewer processes"
                )
        loaders[name] = Loader(samples, order, *where, config.seed, room)
        room -= loaders[name].placed_bytes
    return loaders


def free_memory(device: torch.device) -> int:
    """Return the free memory of `device`, in bytes; for a CPU, what this process may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def ignore_stop_signals(worker: int) -> None:
    """Let a worker outlive a signal to the whole job: its loader ends it, after the last update."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """End all workers at once: they ignore SIGTERM, and one may hold what the others wait for."""
    # A loader's handler would raise an error in place of the one that ends the run.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def moved(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device; on CUDA each is copied while the one before is used."""
    if device.type != "cuda":
        yield from (send_to_device(batch, device) for batch in batches)
        return
    copying, training = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    ahead: list[Batch] = []
    for batch in batches:
        training.wait_stream(copying)  # for the copy made last, and not for the next
        ready = ahead
        with torch.cuda.stream(copying):
            ahead = [send_to_device(batch, device, non_blocking=True)]
        # Allocated for the other stream, and not to be reused before this one is done.
        recursively_apply(torch.Tensor.record_stream, ahead, training)
        yield from ready
    training.wait_stream(copying)
    yield from ahead
