"""Loaders: the batches of a split in a resumable order, from device memory or from workers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import psutil
import torch
from accelerate.utils import send_to_device
from torch.utils import _pytree as tree

from common.data.iterable import IterableSamples
from common.data.order import EvaluationOrder, TrainingOrder, rehearsal_batches
from common.data.samples import Batch, BatchesWithWork, Samples
from common.data.workers.pool import BATCH_TIMEOUT, MicroBatches, Workers
from common.errors import UserError
from common.system.devices import is_accelerator, memory_info
from common.system.processor import cores_per_process

# Images are gathered this many bytes at a time, and then cut into micro-batches. A few large
# operations cost less than many small ones. On a CPU, the result should fit into its cache. On an
# accelerator, more is better, and this is a small part of its memory.
GATHER_BYTES_OF_CPU = 2 * 2**20
GATHER_BYTES_OF_ACCELERATOR = 32 * 2**20


def worker_count(samples: Samples, requested: int | None) -> int:
    """Return how many workers make the batches of a split; 0: this process makes them.

    Args:
        requested: the value of `--num-workers`; None: the count follows from the number of cores.
    """
    if requested is not None:
        count = requested
    elif samples.blocks is not None:
        # A single worker uses threads. Each of several workers would have to read all blocks.
        count = 1
    else:
        count = min(8, cores_per_process())
    if isinstance(samples, IterableSamples):
        return min(1, count)  # the data set has one position, so only one process can read it
    return count


def never() -> bool:
    """Answer "no": without the signals of a run, nothing stops and nothing is rehearsed."""
    return False


def ignore(samples: int) -> None:
    """Note nothing, because there is no rehearsal without the signals of a run."""


@dataclass(frozen=True)
class RunSignals:
    """What a loader asks its run between two batches."""

    # Whether this process got a request to stop. A long wait for workers then ends.
    is_asked_to_stop: Callable[[], bool] = never
    # Whether any rank got such a request, as far as this rank knows. An evaluation then ends before
    # its next batch.
    is_stop_announced: Callable[[], bool] = never
    # Whether an evaluation is only a rehearsal: a few batches before training, to find mistakes.
    is_rehearsing: Callable[[], bool] = never
    # Whether the recipe evaluates now, be it a rehearsal or not.
    is_evaluating: Callable[[], bool] = never
    # Called in a rehearsal with the size of each batch, in samples.
    note_rehearsed: Callable[[int], None] = ignore


NO_SIGNALS = RunSignals()


class Loader:
    """Yields the micro-batches of one split for this rank, already on the device."""

    def __init__(
        self,
        samples: Samples,
        order: TrainingOrder | EvaluationOrder,
        device: torch.device,
        placement: str,
        num_workers: int | None = None,
        *,
        seed: int = 0,
        memory_budget: float | None = None,
        timeout: float = BATCH_TIMEOUT,
        signals: RunSignals = NO_SIGNALS,
    ) -> None:
        """Choose where batches are made. If that is on the device, place the samples there.

        Args:
            placement: "device" makes batches from samples in the device's memory; "workers" makes
                them in worker processes. "auto" chooses "device" if the samples fit into
                `memory_budget`.
            num_workers: worker processes; with 0, this process makes the batches. By default, it
                follows from the number of cores.
            seed: the seed of the run, for augmentation; `samples` gets it.
            memory_budget: bytes of the device's memory that "auto" may use; by default half of the
                free memory. The splits of a run share one budget: see `placed_bytes`.
            timeout: seconds to wait for one batch of the workers. After that, they are killed, and
                a `UserError` ends the wait.
            signals: the signals of the run that uses the batches; by default, nothing interrupts.

        Raises:
            UserError: `placement` is "device", and the samples can't be placed.
        """
        self.samples = samples
        self.order = order
        self.device = device
        self.placement = choose_placement(placement, samples, device, memory_budget)
        self.num_workers = 0
        if self.placement == "workers":
            self.num_workers = worker_count(samples, num_workers)
        self.workers = Workers(samples, self.num_workers, device, timeout, signals.is_asked_to_stop)
        self.signals = signals
        samples.seed = seed
        self.placed_bytes = 0  # bytes of the device's memory that the samples take
        if self.placement == "device":
            samples.place(device)
            self.placed_bytes = samples.num_bytes or 0

    def cut_into(self, batch_size: int, accumulation: int) -> None:
        """Cut the same order into micro-batches of another size, as `--auto-batch-size` chooses.

        An update has the same samples as before if `batch_size` × `accumulation` is the same.

        Args:
            accumulation: micro-batches per update; an evaluation has no updates, and ignores it.
        """
        changes = {"batch_size": batch_size}
        if isinstance(self.order, TrainingOrder):
            changes["accumulation"] = accumulation
        self.order = replace(self.order, **changes)  # type: ignore[arg-type]

    @property
    def batches_per_gather(self) -> int:
        """How many batches are gathered at once; 1 also if workers make each batch by itself."""
        size = self.samples.num_bytes
        if self.placement == "workers" or not size:
            return 1
        if self.samples.lengths is not None:  # batches differ in length, as in text
            return 1
        gather_bytes = GATHER_BYTES_OF_CPU
        if is_accelerator(self.device):
            gather_bytes = GATHER_BYTES_OF_ACCELERATOR
        # One batch takes size / len(self.samples) * batch_size bytes.
        return max(1, gather_bytes * len(self.samples) // (size * self.order.batch_size))

    def batch_of(self, indices: torch.Tensor) -> Batch:
        """Make one batch, augmented as in epoch 0.

        `--auto-batch-size` tries sizes with these batches, because they don't advance the order of
        training.

        Args:
            indices: those of the samples of the batch, int64 [batch], on the host.
        """
        if self.placement == "device":
            return self.samples.gather(indices, 0)
        batch = send_to_device(self.samples.read(indices, 0), self.device)
        return self.samples.finish(batch, indices, 0)

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch of an evaluation, until a request to stop ends the evaluation.

        In a rehearsal, there are only a few small batches.

        Raises:
            UserError: this is the loader for training.
        """
        order = self.order
        if not isinstance(order, EvaluationOrder):
            raise self.misused_error()
        if self.signals.is_rehearsing():
            yield from self.rehearsed(self.rehearsal_of(order.batches()))
            return
        for batch, _ in self.evaluation_batches(order.batches()):
            if self.signals.is_stop_announced():
                return
            yield batch

    def equal_batches(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield the same number of batches of the same size on all ranks.

        Ranks that share out a model need this: they exchange values within each batch. For the same
        reason, a request to stop does not cut the evaluation short. In a rehearsal, there are only
        a few small batches.

        Yields:
            A batch, and which of its samples count: bool [size], on the device; false for a sample
            that only fills up the batch.

        Raises:
            UserError: this is the loader for training.
        """
        if not isinstance(self.order, EvaluationOrder):
            raise self.misused_error()
        micro_batches, is_real = self.order.equal_batches()
        if self.signals.is_rehearsing():
            batches = self.rehearsed(self.rehearsal_of(micro_batches))
            is_real = self.rehearsal_of(is_real)
        else:
            batches = (batch for batch, _ in self.evaluation_batches(micro_batches))
        for batch, is_real_in_batch in zip(batches, is_real, strict=True):
            yield batch, is_real_in_batch.to(self.device)

    def misused_error(self) -> UserError:
        """Return the error for a loop over the loader for training, as if it were another one."""
        if self.signals.is_evaluating():
            return UserError(
                "the evaluation reads train_loader, which is only for training",
                advice=(
                    "for figures of training samples, add a split with some of them to Data, such "
                    'as "train_part", and evaluate run.all_loaders["train_part"]'
                ),
            )
        return UserError(
            "the loop is over train_loader itself, so no checkpoint would contain its position",
            advice=(
                "to train, loop over run.batches(train_loader); for another purpose, such as the "
                'statistics of batch norm, give Data a further split of training samples, "part" '
                'for example, and loop over run.all_loaders["part"]'
            ),
        )

    def rehearsal_of(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the few batches of a rehearsal, from the `batches` of an evaluation.

        Args:
            batches: for each batch, one value per sample: its index; or in `equal_batches`, whether
                it counts.
        """
        # Samples from all over the split would lie in many blocks, and each block is slow to read.
        is_spread = self.samples.blocks is None
        return rehearsal_batches(batches, self.order.batch_size, is_spread)

    def rehearsed(self, micro_batches: list[torch.Tensor]) -> Iterator[Batch]:
        """Make the micro-batches of a rehearsal, and yield them as an evaluation would.

        Workers that the rehearsal starts are ended afterwards: they would only take memory until
        the first real evaluation. Workers that ran before go on.
        """
        had_workers = self.workers.has_loader
        try:
            batches_with_work = self.evaluation_batches(micro_batches)
            for indices, (batch, _) in zip(micro_batches, batches_with_work, strict=True):
                self.signals.note_rehearsed(len(indices))
                yield batch
        finally:
            if not had_workers:
                self.workers.close()

    def epoch(self, epoch: int, first_update: int = 0) -> BatchesWithWork:
        """Yield each batch and how much work it holds, from an update to the end of the epoch.

        Raises:
            UserError: stored samples have changed since the first batches.
        """
        assert isinstance(self.order, TrainingOrder)
        if self.placement == "device":
            # `gathered` needs the micro-batches of the whole epoch, because it groups them from the
            # epoch's beginning.
            first_micro_batch = first_update * self.order.accumulation
            micro_batches: MicroBatches = self.order.micro_batches(epoch)
            batches = self.gathered(micro_batches, epoch, first_micro_batch)
            micro_batches = micro_batches[first_micro_batch:]
        else:
            micro_batches = self.order.micro_batches(epoch, first_update)
            batches = self.workers.batches(micro_batches, epoch)
        yield from self.with_work(micro_batches, batches)

    def evaluation_batches(self, micro_batches: list[torch.Tensor]) -> BatchesWithWork:
        """For each micro-batch of an evaluation, yield its batch and how much work it holds.

        Args:
            micro_batches: the sample indices of each micro-batch, int64 [batch].

        Raises:
            UserError: stored samples have changed since the first batches.
        """
        if self.placement == "device":
            batches = self.gathered(micro_batches, epoch=None)
        else:
            batches = self.workers.batches(micro_batches, epoch=None)
        batches_with_work = self.with_work(micro_batches, batches)
        for indices, batch_with_work in zip(micro_batches, batches_with_work, strict=True):
            # The last batches of an evaluation may be smaller than all others. The context lasts
            # while the caller computes with the batch.
            is_short = len(indices) < self.order.batch_size
            with without_tuning() if is_short else nullcontext():
                yield batch_with_work

    def close(self) -> None:
        """End the workers, if there are any."""
        self.workers.close()

    def with_work(self, micro_batches: MicroBatches, batches: Iterator[Batch]) -> BatchesWithWork:
        """Yield each batch and how much work it holds.

        Args:
            micro_batches: the sample indices of each batch, int64 [batch].

        Raises:
            UserError: stored samples have changed since the first batches.
        """
        self.samples.refuse_changes()
        for indices, batch in zip(micro_batches, batches, strict=True):
            yield batch, self.samples.work_of(batch, indices)
        self.samples.refuse_changes()

    def gathered(
        self, micro_batches: MicroBatches, epoch: int | None, first_micro_batch: int = 0
    ) -> Iterator[Batch]:
        """Gather batches from the device's memory, several at a time if possible.

        A group of batches that are gathered together always begins at a multiple of the group's
        size, wherever a resumed run begins. So each batch lies at the same place in its group: its
        alignment in memory may decide the last bits of a result. Batches before `first_micro_batch`
        are gathered with their group, but not yielded.

        Args:
            epoch: the epoch in which the samples are augmented; None in an evaluation.
            first_micro_batch: the number of the first micro-batch to yield.
        """
        per_gather = self.batches_per_gather
        first_start = first_micro_batch - first_micro_batch % per_gather
        for start in range(first_start, len(micro_batches), per_gather):
            group = micro_batches[start : start + per_gather]
            group_batch = self.samples.gather(torch.cat(list(group)), epoch)
            if len(group) == 1:
                yield group_batch
                continue
            # Cut each tensor of the nested batch into the batches of the group.
            leaves, structure = tree.tree_flatten(group_batch)
            sizes = [len(indices) for indices in group]
            split_leaves = [values.split(sizes) for values in leaves]
            for number, parts in enumerate(zip(*split_leaves, strict=True), start):
                if number >= first_micro_batch:
                    yield tree.tree_unflatten(parts, structure)


@contextmanager
def without_tuning() -> Iterator[None]:
    """Keep cuDNN from trying all of its kernels for a batch size that occurs only once."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def choose_placement(
    requested: str, samples: Samples, device: torch.device, memory_budget: float | None
) -> str:
    """Return where batches are made: "device" or "workers".

    Args:
        requested: the value of `--data-placement`. "auto" chooses "device" if the samples fit.
        memory_budget: bytes of the device's memory that "auto" may use; None: half of what is free.

    Raises:
        UserError: "device" is requested, and the samples can't be placed.
    """
    size = samples.num_bytes
    free = free_memory_bytes(device)
    if requested == "device":
        check_fits(size, free, device)
    if requested != "auto":
        return requested
    allowed = free / 2 if memory_budget is None else memory_budget
    return "device" if size is not None and size < allowed else "workers"


def check_fits(size: int | None, free: int, device: torch.device) -> None:
    """Raise a `UserError` if `--data-placement device` is set, but the samples can't be placed.

    Args:
        size: bytes of the samples; None if they are made when needed, and can't be placed.
        free: free bytes of the device's memory. They don't matter on a CPU, where samples stay in
            memory-mapped files.
    """
    if size is None:
        problem = "are made one by one"
    elif is_accelerator(device) and size > free:
        problem = f"take {size / 2**20:,.0f} MiB, but only {free / 2**20:,.0f} MiB are free"
    else:
        return
    raise UserError(
        f"--data-placement device can't be used, because the samples of this recipe {problem}",
        advice="pass --data-placement workers, or leave the flag out",
    )


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of `device`.

    For a CPU, and for a device that does not report its memory, return that of this machine.
    """
    memory = memory_info(device)
    if memory is not None:
        return memory.free
    try:
        return psutil.virtual_memory().available
    except (OSError, psutil.Error):  # there is no /proc
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
