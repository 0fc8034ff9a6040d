"""How workers send batches: in shared memory if there is room, otherwise through pipes."""

import contextlib
import errno
import multiprocessing
import shutil
from collections.abc import Callable
from mmap import mmap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data._utils.collate import default_collate_fn_map

from common.system.platforms.limits import (
    descriptor_limit,
    open_descriptors,
    raise_descriptor_limit,
)

SHARED_MEMORY = Path("/dev/shm")
# The process that receives batches holds a file descriptor for each tensor in shared memory. So
# batches travel through pipes if this process may open fewer files than this.
FEW_DESCRIPTORS = 256
# File descriptors that this process needs for each worker: both ends of the pipe of the worker's
# queue, the pipe that tells whether the worker is alive, its part of the result queue, and a few
# for files that a data set opens.
DESCRIPTORS_OF_A_WORKER = 8
SPARE_DESCRIPTORS = 16  # file descriptors that must stay free besides those for workers
LOCKS_OF_A_QUEUE = 4  # at most; each worker has a queue, and all workers share one for results
NO_SHARED_MEMORY = "unable to allocate shared memory"  # a part of torch's error
# What pickle sends instead of an object: a function that makes the object again, and its
# arguments.
Reduced = tuple[Callable[..., object], tuple[object, ...]]
# Torch's functions that make a batch of samples, by the samples' type.
CollateFunctions = dict[type | tuple[type, ...], Callable[..., object]]
# Torch's own function that stacks tensors, in a worker in shared memory. There, `collate_tensors`
# takes its place, and calls it.
collate_in_shared_memory = default_collate_fn_map[torch.Tensor]


def prepare_worker() -> None:
    """Have this worker send tensors through pipes when shared memory has no room for them.

    By default, the thread that sends batches drops such a batch without an error, and the training
    process waits for that batch forever.
    """
    ForkingPickler.register(torch.UntypedStorage, share_or_copy)
    default_collate_fn_map[torch.Tensor] = collate_tensors


def share_or_copy(storage: torch.UntypedStorage) -> Reduced:
    """Reduce a storage for pickle: to its place in shared memory, or else to a copy of its bytes.

    The bytes are copied if shared memory has no room, or if this process may open few files.
    """
    # Only storages on a CPU can be copied. Torch sends all others in its own way.
    if storage.device.type != "cpu" or has_descriptors_for_sharing():
        try:
            return reduce_storage(storage)
        except (OSError, RuntimeError) as error:
            if not is_without_room(error):
                raise
    values = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
    return storage_from_bytes, (values.numpy(),)


def storage_from_bytes(values: np.ndarray) -> torch.UntypedStorage:
    """Make a storage from a copy of its bytes, in the process that receives them."""
    # Kernels may add unaligned values in another order, which changes the last bits of a result.
    # `clone` copies the values to memory that torch aligns.
    return torch.from_numpy(values).clone().untyped_storage()


def collate_tensors(
    tensors: list[torch.Tensor], *, collate_fn_map: CollateFunctions | None = None
) -> torch.Tensor:
    """Stack samples in shared memory, as torch's `default_collate` does in a worker.

    If shared memory has no room, they are stacked in ordinary memory.
    """
    try:
        return collate_in_shared_memory(tensors, collate_fn_map=collate_fn_map)
    except RuntimeError as error:
        if not is_without_room(error):
            raise
    return torch.stack(tensors)


def is_without_room(error: Exception) -> bool:
    """Whether an error says that shared memory is full, or that no more files can be opened."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC)
    return NO_SHARED_MEMORY in str(error)


def by_path(mapped: np.memmap) -> Reduced:
    """Reduce a memory map for pickle to its path, so that the other process maps the same file.

    By default, pickle would send the contents of the file. Only a slice of a map is sent by its
    contents, because its offset in the file is not known.
    """
    if not isinstance(mapped.base, mmap):  # a slice of a map
        return np.array, (np.asarray(mapped),)
    order = "C" if mapped.flags.c_contiguous else "F"
    # "w+" would erase the file when it is opened again.
    mode = mapped.mode.replace("w+", "r+")
    return np.memmap, (mapped.filename, mapped.dtype, mode, mapped.offset, mapped.shape, order)


def obstacle_to_workers(count: int) -> str | None:
    """Return why `count` worker processes can't start here; None if nothing is in their way.

    A low limit on this process's open files is raised first, if the system allows it.
    """
    raise_descriptor_limit(FEW_DESCRIPTORS, 4 * FEW_DESCRIPTORS)
    try:
        # Each lock is a file in /dev/shm. Make as many as the queues will need, all at once, to see
        # whether that is possible.
        locks = [multiprocessing.Lock() for _ in range(LOCKS_OF_A_QUEUE * (count + 1))]
        del locks
    except OSError as error:
        return f"{SHARED_MEMORY} can't be used ({error.strerror})"
    free = free_descriptors()
    needed = DESCRIPTORS_OF_A_WORKER * count + SPARE_DESCRIPTORS
    if free is not None and free < needed:
        return f"they need {needed} file descriptors, and {free} are free (ulimit -n)"
    return None


def free_descriptors() -> int | None:
    """Return how many more files this process can open; None if that is not known."""
    limit = descriptor_limit()
    used = open_descriptors()
    if limit is None or used is None:
        return None
    return limit - used


def has_descriptors_for_sharing() -> bool:
    """Whether the training process may open enough files to receive tensors in shared memory.

    A worker asks this about its own limit, which it has inherited from the training process.
    """
    limit = descriptor_limit()
    return limit is None or limit >= FEW_DESCRIPTORS


def free_shared_memory() -> int | None:
    """Return the free bytes of shared memory; None if the system does not tell.

    `Workers` warns the user if they are too few for the batches that are made in advance.
    """
    with contextlib.suppress(OSError):  # some systems have no such folder
        return shutil.disk_usage(SHARED_MEMORY).free
    return None


def bytes_of(batch: object) -> int:
    """Return the bytes that all tensors in a nest of dicts, lists and tuples take together.

    `Workers` compares them with `free_shared_memory`.
    """
    # Torch's `tree_leaves` is not used, because it takes 8 µs for a flat dict, and this takes 2 µs.
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    return sum(map(bytes_of, batch))
