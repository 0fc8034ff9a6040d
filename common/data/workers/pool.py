"""Worker processes that make batches on the host."""

import atexit
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from common.console import warn
from common.data.iterable import IterableSamples
from common.data.samples import Batch, Samples
from common.data.workers.device_copies import copied_to_device
from common.data.workers.errors import meaning_of_error
from common.data.workers.processes import (
    begin_worker,
    kill_workers,
    new_children,
    restoring_child_handler,
)
from common.data.workers.transport import (
    SHARED_MEMORY,
    by_path,
    bytes_of,
    free_shared_memory,
    obstacle_to_workers,
)
from common.data.workers.watch import LOADER_NAMES, Watch, WorkerNames
from common.errors import LostProcessError, UserError
from common.failures.error_causes import is_out_of_memory
from common.system import devices
from common.system.allocator import HEAP
from common.system.platforms.limits import worker_start_method
from common.system.platforms.signals import stop_signals_held_back

BATCH_TIMEOUT = 180.0  # seconds to wait for one batch, unless a run says otherwise
PREFETCHED = 2  # batches that each worker makes in advance
MicroBatches = Sequence[torch.Tensor] | torch.Tensor


@dataclass
class BatchRequests:
    """The batches to make next, as the sampler of torch's loader.

    It yields the sample indices of each batch (int64 [batch]) and the epoch (None in an
    evaluation). Torch's loader and its workers outlive an epoch, and a loader's sampler can't be
    replaced. So `Workers.fetched` puts the batches of each epoch into the same object.
    """

    micro_batches: MicroBatches = ()
    epoch: int | None = None

    def __iter__(self) -> Iterator[tuple[np.ndarray, int | None]]:
        return ((indices.numpy(), self.epoch) for indices in self.micro_batches)


@dataclass
class Reader:
    """The data set of torch's loader, which maps a request of `BatchRequests` to a batch.

    Each worker holds a copy, made when the workers start.
    """

    samples: Samples

    def __getitem__(self, request: tuple[np.ndarray, int | None]) -> Batch | UserError:
        indices, epoch = request
        try:
            return self.samples.read(torch.from_numpy(indices), epoch)
        except UserError as error:
            # A `UserError` exits the process that raises it. The worker must live on, and so it
            # sends the error instead of the batch.
            return error


class Workers:
    """The `count` worker processes that make the batches of one split; 0: this process makes them.

    The workers start with the first batch, and go on until `close`.

    A worker may be stopped or hang. The user is then told for which worker this process waits. If
    the run is asked to stop during the wait, the workers are killed and this process makes the
    remaining batches itself, with the same bits.
    """

    # Keys of the warnings that the user has already seen, from any loader of this process.
    announced: ClassVar[set[str]] = set()

    def __init__(
        self,
        samples: Samples,
        count: int,
        device: torch.device,
        timeout: float,
        is_stopping: Callable[[], bool],
        names: WorkerNames = LOADER_NAMES,
    ) -> None:
        """Note what is needed to start the workers, without starting them.

        Args:
            samples: the split.
            count: the number of workers; 0: this process makes the batches.
            device: the device that batches are copied to.
            timeout: seconds to wait for one batch; then the workers are killed, and the wait ends
                with a `UserError`.
            is_stopping: whether the run was asked to stop; a thread calls it.
            names: how messages name the workers.
        """
        self.names = names
        self.samples = samples
        self.count = count
        self.device = device
        self.requests = BatchRequests()
        self.timeout = timeout
        self.is_stopping = is_stopping
        # The loader of torch, whose iterator starts the workers; None before the first batch and
        # after `close`.
        self.torch_loader: DataLoader[Batch] | None = None
        self.watch: Watch | None = None  # None until worker processes have started
        # The bytes that were free in shared memory before the workers started; None if unknown.
        self.free_shared_bytes: int | None = None
        self.largest_batch = 0  # bytes

    def iterate(self) -> Iterator[Batch]:
        """Return an iterator of torch's loader, which is made first if there is none."""
        if self.torch_loader is None:
            self.torch_loader = self.make_torch_loader()
        return iter(self.torch_loader)

    def make_torch_loader(self) -> DataLoader[Batch]:
        """Return a new loader of torch, with the current number of workers."""
        # At exit, Python sends SIGTERM to the workers and waits for them. They ignore SIGTERM, so
        # they must be killed before.
        atexit.register(kill_workers)
        ForkingPickler.register(np.memmap, by_path)
        return DataLoader(
            Reader(self.samples),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.requests,
            num_workers=self.count,
            multiprocessing_context=worker_start_method() if self.count > 0 else None,
            persistent_workers=self.count > 0,
            prefetch_factor=PREFETCHED if self.count > 0 else None,
            collate_fn=return_unchanged,
            pin_memory=devices.has_pinned_memory(self.device),
            worker_init_fn=begin_worker,
            # Each new iterator draws a seed. It must not come from the generator of dropout.
            generator=torch.Generator(),
        )

    @property
    def has_loader(self) -> bool:
        """Whether there is a loader of torch, and so perhaps workers.

        A rehearsal asks this, because it ends only workers that it has started itself.
        """
        return self.torch_loader is not None

    def close(self) -> None:
        """End the workers and the watch over them; the next batches start new ones."""
        if self.watch is not None:
            self.watch.ended.set()
            self.watch = None
        # Without a reference to it, torch's loader is deleted and ends its workers.
        self.torch_loader = None

    def batches(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order, on the device, where `Samples.finish` completes them.

        Each batch is copied to the device while the previous one is in use.
        """
        batches_on_device = copied_to_device(self.fetched(micro_batches, epoch), self.device)
        for indices, batch in zip(micro_batches, batches_on_device, strict=True):
            yield self.samples.finish(batch, indices, epoch)

    def fetched(self, micro_batches: MicroBatches, epoch: int | None) -> Iterator[Batch]:
        """Yield the batches in order on the host, as `Samples.fetch` made them.

        Those of torch's loader are in pinned memory if the device has it.

        Raises:
            Exception: see `receive` and `end_after`.
        """
        self.requests.micro_batches = micro_batches
        self.requests.epoch = epoch
        num_yielded = 0
        batch = None  # the last batch that was received
        batches: Iterator[Batch] | None = None
        try:
            batches = self.begin()
            while num_yielded < len(micro_batches):
                batch = self.receive(batches)
                yield batch
                num_yielded += 1
        except (Exception, UserError) as error:
            # Let go of torch's iterator, also in the frames that raised the error. If the garbage
            # collector found it later, it would close the pipes to the workers while threads write
            # to them, and each thread would print a traceback.
            batches = None
            traceback.clear_frames(error.__traceback__)
            self.end_after(error)
        # If batches are missing here, the workers were killed because the run is stopping. This
        # process makes the missing batches. An `IterableDataset` is read in sequence, so it
        # goes on behind the worker's last batch.
        if num_yielded < len(micro_batches) and isinstance(self.samples, IterableSamples):
            self.samples.go_on_after(batch)
        for number in range(num_yielded, len(micro_batches)):
            yield self.samples.read(micro_batches[number], epoch)

    def begin(self) -> Iterator[Batch]:
        """Return an iterator over the requested batches; start the workers if none run yet."""
        if self.watch is not None:
            # Workers are running. `iterate` waits until each of them is ready for the new requests.
            with self.watch.waiting():
                return self.iterate()
        if self.count > 0:
            obstacle = obstacle_to_workers(self.count)
            if obstacle is not None:
                self.do_without_workers(obstacle)
        # `do_without_workers` has set the count to 0 if there was an obstacle.
        if self.count == 0:
            return self.iterate()
        return self.start_workers()

    def start_workers(self) -> Iterator[Batch]:
        """Start the workers and the watch over them; do without workers if the system refuses."""
        self.free_shared_bytes = free_shared_memory()
        HEAP.trim()  # a fork of this process would take copies of the pages
        earlier_children = multiprocessing.active_children()
        try:
            with restoring_child_handler(), stop_signals_held_back():
                batches = self.iterate()
        except (OSError, RuntimeError) as error:
            # The system refuses with an OSError or for lack of memory. Other errors are mistakes.
            if not isinstance(error, OSError) and not is_out_of_memory(error):
                raise
            for worker in new_children(earlier_children):
                worker.kill()
            self.do_without_workers(str(error))
            return self.iterate()
        workers = new_children(earlier_children)
        # The lambda looks `is_stopping` up at each call, because tests replace it.
        self.watch = Watch(workers, self.timeout, lambda: self.is_stopping(), self.names)
        self.watch.start()
        return batches

    def do_without_workers(self, obstacle: str) -> None:
        """Have this process make the batches from now on, and tell the user why, once.

        Args:
            obstacle: why no workers can be started, for the warning.
        """
        if "no workers" not in self.announced:
            self.announced.add("no workers")
            warn(
                f"data    {self.names.name} can't be started ({obstacle}), so this process does "
                "their work"
            )
        self.count = 0
        self.close()

    def receive(self, batches: Iterator[Batch]) -> Batch:
        """Wait for the next batch.

        Raises:
            UserError: the worker raised it, and sent it instead of the batch. Each rank that gets
                one prints it, because the mistake may be in the samples of one rank only.
        """
        if self.watch is None:
            batch = next(batches)
        else:
            with self.watch.waiting():
                batch = next(batches)
        if isinstance(batch, UserError):
            raise UserError(
                batch.problem, advice=batch.advice, every_rank=True, resumable=batch.resumable
            )
        self.warn_of_small_shared_memory(batch)
        return batch

    def warn_of_small_shared_memory(self, batch: Batch) -> None:
        """Warn once if shared memory is too small for the batches that workers make in advance.

        Batches of text differ in size, so each batch that is larger than all before it is checked.
        """
        if self.count == 0 or self.free_shared_bytes is None or "shared memory" in self.announced:
            return
        size = bytes_of(batch)
        if size <= self.largest_batch:
            return
        self.largest_batch = size
        # One batch is added, because this process still holds the batch that it uses.
        needed = size * (PREFETCHED * self.count + 1)
        if self.free_shared_bytes >= needed:
            return
        self.announced.add("shared memory")
        free_mib = self.free_shared_bytes / 2**20
        needed_mib = needed / 2**20
        warn(
            f"data    {SHARED_MEMORY} has {free_mib:,.2f} MiB free, but the batches that workers "
            f"make in advance need {needed_mib:,.2f} MiB, so the rest goes through pipes, which is "
            "slower (in Docker, pass a larger --shm-size)"
        )

    def end_after(self, error: Exception | UserError) -> None:
        """End all workers after an error in a wait for them, and raise what the error means.

        If the watch killed the workers because the run was asked to stop, nothing is raised. The
        caller then makes the remaining batches.

        Args:
            error: the error of torch's loader, or of this process if it makes the batches.

        Raises:
            Exception: `error` itself, or the error that `meaning_of_error` returns.
        """
        watch = self.watch
        if self.count > 0:
            # Workers of other loaders go on, because an evaluation may be due before the run stops.
            # Without a watch, the workers could not start: all are killed, and `error` is raised.
            kill_workers(None if watch is None else watch.workers)
        self.close()
        if watch is None:
            raise error
        meaning = meaning_of_error(error, watch, self.timeout, self.names)
        if meaning is error:
            raise error
        if meaning is not None:
            raise meaning from (error if isinstance(meaning, LostProcessError) else None)


def return_unchanged(batch: Batch) -> Batch:
    """Return a batch as it is. Torch's default would convert arrays in it to tensors."""
    return batch
