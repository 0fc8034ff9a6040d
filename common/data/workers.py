"""Batches made on the host, in processes that end with their loader, and moved to the device."""

import atexit
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader

from common.data.batch import Batch, Samples
from common.errors import LostProcessError, UserError
from common.machine import STOP_SIGNALS

GONE = "DataLoader worker (pid"  # as it says that one was killed, or has exited
MicroBatches = Sequence[torch.Tensor] | torch.Tensor


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
        except UserError as error:  # which would end a worker: in place of a batch
            return UserError(error.message, resumable=error.resumable)


class Workers:
    """As many processes as asked for, or this one for 0, that make batches until `close`."""

    def __init__(self, samples: Samples, count: int, device: torch.device) -> None:
        self.samples, self.count, self.device, self.asked = samples, count, device, Asked()

    @cached_property
    def processes(self) -> DataLoader[Any]:
        atexit.register(kill_workers)  # Python would wait for them, and they ignore SIGTERM
        ForkingPickler.register(np.memmap, by_path)
        return DataLoader(
            Reader(self.samples),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.asked,
            num_workers=self.count,
            persistent_workers=self.count > 0,
            collate_fn=as_it_is,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=ignore_stop_signals,
            # Its own generator: making an iterator must not draw from the one of dropout.
            generator=torch.Generator(),
        )

    @property
    def have_begun(self) -> bool:
        return "processes" in vars(self)

    def close(self) -> None:
        vars(self).pop("processes", None)

    def batches(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order, on the device: moved while the one before is used."""
        made = moved(self.fetched(micro_batches, epoch), self.device)
        for samples, batch in zip(micro_batches, made, strict=True):
            yield self.samples.finish(batch, samples, epoch)

    def fetched(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order as they are made, in pinned memory for CUDA."""
        self.asked.micro_batches, self.asked.epoch = micro_batches, epoch
        try:
            for batch in self.processes:
                if isinstance(batch, UserError):
                    raise UserError(batch.message, every_rank=True, resumable=batch.resumable)
                yield batch
        except Exception as error:
            self.close()
            if self.count == 0:
                raise
            kill_workers()
            words = str(error).strip()
            is_lost = GONE in words or isinstance(error, (ConnectionError, EOFError))
            # What a data set raises in a worker says that it was caught there.
            if is_lost and not words.startswith("Caught"):
                raise LostProcessError(f"a worker of the loader is gone ({words})") from error
            raise


def as_it_is(batch: Batch) -> Batch:
    return batch


def by_path(mapped: np.memmap) -> tuple[Any, ...]:
    """Let another process open a memory map itself: it would be sent what the file holds."""
    if not isinstance(mapped.base, mmap):  # a part of one, whose place in the file is not known
        return np.array, (np.asarray(mapped),)
    order: Any = "C" if mapped.flags.c_contiguous else "F"
    mode: Any = mapped.mode.replace("w+", "r+")
    return np.memmap, (mapped.filename, mapped.dtype, mode, mapped.offset, mapped.shape, order)


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
