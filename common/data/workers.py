"""Batches made on the host, in processes that end with their loader, and moved to the device."""

import atexit
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader

from common.console import warn
from common.data.batch import Batch, Samples
from common.data.iterable import IterableSamples
from common.data.transport import (
    SHARED_MEMORY,
    by_path,
    bytes_of,
    free_shared_memory,
    obstacle_to_workers,
    prepare_worker,
)
from common.data.watch import Watch
from common.errors import LostProcessError, UserError, is_out_of_memory
from common.machine import STOP_SIGNALS

GONE = "DataLoader worker (pid"  # as it says that one was killed, or has exited
TOO_MANY_FILES = "Too many open files"
PREFETCHED = 2  # batches that each worker makes ahead
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
    """As many processes as asked for, or this one for 0, that make batches until `close`.

    A worker may be stopped, or hang. Whoever waits for its batch is told, and a request to stop is
    heeded meanwhile: this process then makes the batches itself, with the same bits.
    """

    announced: ClassVar[set[str]] = set()  # of what the user knows by now, from any loader

    def __init__(self, samples: Samples, count: int, device: torch.device) -> None:
        self.samples, self.count, self.device, self.asked = samples, count, device, Asked()
        self.patience = 180.0  # seconds to wait for one batch
        self.is_stopping: Callable[[], bool] = lambda: False  # whether the run was asked to stop
        self.watch: Watch | None = None  # over the workers that were started
        self.free_memory: int | None = None  # bytes of shared memory when they were
        self.is_compared = False  # whether a batch was compared with it

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
            prefetch_factor=PREFETCHED if self.count > 0 else None,
            collate_fn=as_it_is,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=begin_worker,
            # Its own generator: making an iterator must not draw from the one of dropout.
            generator=torch.Generator(),
        )

    @property
    def have_begun(self) -> bool:
        return "processes" in vars(self)

    def close(self) -> None:
        if self.watch is not None:
            self.watch.ended.set()
            self.watch = None
        vars(self).pop("processes", None)

    def batches(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order, on the device: moved while the one before is used."""
        made = moved(self.fetched(micro_batches, epoch), self.device)
        for samples, batch in zip(micro_batches, made, strict=True):
            yield self.samples.finish(batch, samples, epoch)

    def fetched(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order as they are made, in pinned memory for CUDA."""
        self.asked.micro_batches, self.asked.epoch = micro_batches, epoch
        count, batch = 0, None
        try:
            made = self.begin()
            while count < len(micro_batches):
                batch = self.receive(made)
                yield batch
                count += 1
        except Exception as error:
            self.end_after(error)
        if count < len(micro_batches) and isinstance(self.samples, IterableSamples):
            self.samples.go_on_after(batch)
        for number in range(count, len(micro_batches)):
            yield self.samples.read(micro_batches[number], epoch)

    def begin(self) -> Iterator[Any]:
        """Start the workers, or have those that run go on with what is asked of them next."""
        if self.watch is not None:
            with self.watch.waiting():
                return iter(self.processes)
        obstacle = obstacle_to_workers(self.count) if self.count > 0 else None
        if obstacle is not None:
            self.do_without(obstacle)
        if self.count == 0:
            return iter(self.processes)
        self.free_memory = free_shared_memory()
        before = multiprocessing.active_children()
        try:
            with without_child_handler():
                made = iter(self.processes)
        except (OSError, RuntimeError) as error:
            if not isinstance(error, OSError) and not is_out_of_memory(error):
                raise
            for worker in new_children(before):
                worker.kill()
            self.do_without(str(error))
            return iter(self.processes)
        self.watch = Watch(new_children(before), self.patience, lambda: self.is_stopping())
        self.watch.start()
        return made

    def do_without(self, obstacle: str) -> None:
        """Have this process make the batches, and say why."""
        if "no workers" not in self.announced:
            self.announced.add("no workers")
            warn(f"data    no workers can be started: {obstacle}; this process makes the batches")
        self.count = 0
        self.close()

    def receive(self, made: Iterator[Any]) -> Batch:
        """Wait for the next batch; raise a `UserError` that a worker sent in its place."""
        if self.watch is None:
            batch = next(made)
        else:
            with self.watch.waiting():
                batch = next(made)
        if isinstance(batch, UserError):
            raise UserError(batch.message, every_rank=True, resumable=batch.resumable)
        self.compare_memory(batch)
        return batch

    def compare_memory(self, batch: Batch) -> None:
        """Say once where batches made ahead have no room in shared memory."""
        if "shared memory" in self.announced or self.is_compared or self.count == 0:
            return
        self.is_compared = True
        needed = bytes_of(batch) * (PREFETCHED * self.count + 1)
        if self.free_memory is not None and self.free_memory < needed:
            self.announced.add("shared memory")
            free = self.free_memory / 2**20
            sizes = f"{free:,.2f} MiB are free, and batches need {needed / 2**20:,.2f}"
            way = "the rest goes through pipes, which takes longer"
            warn(f"data    in {SHARED_MEMORY} {sizes}; {way} (in Docker, pass --shm-size)")

    def end_after(self, error: Exception) -> None:
        """End all workers; raise what the error means, unless it is that a stop was requested."""
        watch, self.watch = self.watch, None
        if self.count > 0:
            kill_workers()
        self.close()
        if watch is None:
            raise error
        watch.ended.set()
        words = str(error).strip()
        is_lost = GONE in words or isinstance(error, (ConnectionError, EOFError))
        # What a data set raises in a worker says that it was caught there.
        if words.startswith("Caught") or not (is_lost or TOO_MANY_FILES in words):
            raise error
        if watch.verdict == "no batch came":
            advice = "start it again, or give slow data more with --collective-timeout"
            message = f"no batch came for {self.patience:.0f} s from {watch.reason}: {advice}"
            raise UserError(message, every_rank=True, resumable=True) from None
        if TOO_MANY_FILES in words:
            advice = "raise the limit with ulimit -n 4096, or pass --num-workers 0"
            message = "this process may not open as many files as the loader's workers need"
            raise UserError(f"{message}: {advice}", every_rank=True) from None
        if watch.verdict != "stop requested":
            raise LostProcessError(f"a worker of the loader is gone ({words})") from error


@contextmanager
def without_child_handler() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD away: it raises an error wherever this process stands.

    A worker that is gone is noticed within seconds where its batch is waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def new_children(before: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child not in before]


def as_it_is(batch: Batch) -> Batch:
    return batch


def begin_worker(worker: int) -> None:
    """Let a worker outlive a signal to the whole job: its loader ends it, after the last update."""
    prepare_worker()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """End all workers at once: they ignore SIGTERM, and one may hold what the others wait for."""
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
