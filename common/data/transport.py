"""How batches travel from worker processes: in shared memory where there is room, else in pipes."""

import errno
import multiprocessing
import os
import sys
from mmap import mmap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data._utils.collate import default_collate_fn_map

SHARED_MEMORY = Path("/dev/shm")
# The process that receives batches holds a file descriptor for each tensor in shared memory.
FEW_DESCRIPTORS = 256
# A worker takes both ends of its queue's pipe, the pipe that watches over it, and its parts of the
# queue of results; the rest is for files that a data set opens meanwhile.
DESCRIPTORS_OF_A_WORKER = 8
SPARE_DESCRIPTORS = 16
LOCKS_OF_A_QUEUE = 4  # at most: each worker has a queue, and all share one for results
NO_SHARED_MEMORY = "unable to allocate shared memory"
collate_in_shared_memory = default_collate_fn_map[torch.Tensor]


def prepare_worker() -> None:
    """Have tensors of this worker travel in pipes where shared memory has no room for them.

    The thread that sends batches would otherwise drop a batch without telling anyone, and the
    process that trains would wait for it for ever.
    """
    ForkingPickler.register(torch.UntypedStorage, share_or_copy)
    default_collate_fn_map[torch.Tensor] = collate_tensors


def share_or_copy(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Describe a tensor's storage for another process: in shared memory, or by its bytes."""
    if storage.device.type != "cpu" or has_descriptors_for_sharing():
        try:
            return reduce_storage(storage)
        except (OSError, RuntimeError) as error:
            if not is_without_room(error):
                raise
    values = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
    return storage_of, (values.numpy(),)


def storage_of(values: np.ndarray) -> torch.UntypedStorage:
    # Copied into memory that torch aligns: kernels may add up unaligned values in another order.
    return torch.from_numpy(values).clone().untyped_storage()


def collate_tensors(tensors: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack samples as torch's `default_collate` does, also without room in shared memory."""
    try:
        return collate_in_shared_memory(tensors, collate_fn_map=collate_fn_map)
    except RuntimeError as error:
        if not is_without_room(error):
            raise
    return torch.stack(tensors)


def is_without_room(error: Exception) -> bool:
    """Whether an error says that shared memory is full, or that no descriptor is left for it."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC)
    return NO_SHARED_MEMORY in str(error)


def by_path(mapped: np.memmap) -> tuple[Any, ...]:
    """Let another process open a memory map itself: it would be sent what the file holds."""
    if not isinstance(mapped.base, mmap):  # a part of one, whose place in the file is not known
        return np.array, (np.asarray(mapped),)
    order: Any = "C" if mapped.flags.c_contiguous else "F"
    mode: Any = mapped.mode.replace("w+", "r+")
    return np.memmap, (mapped.filename, mapped.dtype, mode, mapped.offset, mapped.shape, order)


def obstacle_to_workers(count: int) -> str | None:
    """Return why `count` worker processes can't be started here; None where they can."""
    raise_descriptor_limit()
    try:
        # Each is a file in /dev/shm. They are made all at once, and given back here.
        for_queues = [multiprocessing.Lock() for _ in range(LOCKS_OF_A_QUEUE * (count + 1))]
        del for_queues
    except OSError as error:
        return f"{SHARED_MEMORY} can't be used ({error.strerror})"
    free = free_descriptors()
    needed = DESCRIPTORS_OF_A_WORKER * count + SPARE_DESCRIPTORS
    if free is not None and free < needed:
        return f"they need {needed} file descriptors, and {free} are free (ulimit -n)"
    return None


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard limit, which needs no permission."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and soft < FEW_DESCRIPTORS:
        most = 4 * FEW_DESCRIPTORS
        raised = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def descriptor_limit() -> int | None:
    """Return how many files this process may open; None where there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def free_descriptors() -> int | None:
    """Return how many more files this process can open; None where that is not known."""
    limit = descriptor_limit()
    if limit is None:
        return None
    try:
        return limit - len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc
        return None


def has_descriptors_for_sharing() -> bool:
    limit = descriptor_limit()
    return limit is None or limit >= FEW_DESCRIPTORS


def free_shared_memory() -> int | None:
    """Return the free bytes of shared memory; None where the system does not say."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def bytes_of(batch: Any) -> int:
    """Return the bytes of all tensors in a nest of dicts, lists and tuples."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return sum(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
