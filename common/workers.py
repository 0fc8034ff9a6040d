"""Batches that worker processes make on the host, moved to the device ahead of their use."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from common.errors import LostProcessError
from common.signals import STOP_SIGNALS

HostBatch = dict[str, torch.Tensor]


class WorkerBatches(Dataset[HostBatch]):
    """Raw batches by number, for `DataLoader`'s workers."""

    def __init__(
        self,
        fetch: Callable[[torch.Tensor], HostBatch],
        micro_batches: Sequence[torch.Tensor] | torch.Tensor,
    ) -> None:
        """Keep what makes a batch of sample indices, and the indices of each batch."""
        self.fetch = fetch
        self.micro_batches = micro_batches

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, position: int) -> HostBatch:
        return self.fetch(self.micro_batches[position])


def fetched(batches: WorkerBatches, num_workers: int, device: torch.device) -> Iterator[HostBatch]:
    """Yield the batches in order as workers make them, in pinned memory for CUDA.

    Raises:
        RuntimeError: when a worker is gone: `LostProcessError`, or in `DataLoader`'s words.
    """
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_stop_signals,
        # Its own generator: making an iterator must not draw from the one of dropout.
        generator=torch.Generator(),
    )
    try:
        yield from loader
    except (ConnectionError, EOFError) as lost:
        raise LostProcessError("a worker of the loader is gone") from lost


def ignore_stop_signals(worker: int) -> None:
    """Let a worker outlive a signal to the whole job: its loader ends it, after the last update."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """End all workers at once, where their loader can't be waited for.

    They ignore SIGTERM, by which a loader ends them, and one that was killed may have held what
    the others wait for.
    """
    # A loader's handler would raise an error in place of the one that ends the run.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def moved(batches: Iterable[HostBatch], device: torch.device) -> Iterator[HostBatch]:
    """Yield batches on the device.

    On CUDA each is copied while the one before is used, on a stream of its own, which the
    training's stream waits for only then. (Not tried yet, for want of a GPU.)
    """
    if device.type != "cuda":
        for batch in batches:
            yield {name: values.to(device) for name, values in batch.items()}
        return
    copying, training = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    ahead: HostBatch | None = None
    for batch in batches:
        training.wait_stream(copying)  # for the copy made last, and not for the next
        ready = ahead
        with torch.cuda.stream(copying):
            ahead = {name: v.to(device, non_blocking=True) for name, v in batch.items()}
        # Its memory was allocated for the other stream: not to be reused before this one is done.
        for values in ahead.values():
            values.record_stream(training)
        if ready is not None:
            yield ready
    training.wait_stream(copying)
    if ahead is not None:
        yield ahead
