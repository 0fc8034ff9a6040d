"""Remembers which tensors are on the host, where a CPU stands in for an accelerator.

The loop waits if it reads a tensor of the device, but not if it reads one of the host. On a CPU,
the tensors themselves do not tell which is which.
"""

from collections.abc import Iterator

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as tree

from common.checkpoints.shards import is_sharded


class HostStorages:
    """Tensors that are on the host, on a CPU that stands in for an accelerator.

    Tensors that share a storage are on the same side.
    """

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}  # by address

    def __contains__(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self.storages

    def add(self, nest: object) -> None:
        """Count the tensors in a nest of containers as the host's."""
        for tensor in tensors_in(nest):
            storage = storage_of(tensor)
            if storage is not None:
                # While the weak reference exists, no other storage gets this address.
                self.storages[storage._cdata] = StorageWeakRef(storage)

    def remove(self, nest: object) -> None:
        """Count tensors as the device's again, after values of the device were written to them."""
        for tensor in tensors_in(nest):
            storage = storage_of(tensor)
            if storage is not None:
                self.storages.pop(storage._cdata, None)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it has no storage of its own.

    A tensor within `torch.vmap` or `torch.func.grad` has that of the tensor that it wraps.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    local = tensor._local_tensor if is_sharded(tensor) else tensor
    return local.untyped_storage() if local.layout == torch.strided else None


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers."""
    for leaf in tree.tree_leaves(nest):
        if isinstance(leaf, torch.Tensor):
            yield leaf
