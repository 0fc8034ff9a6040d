"""The simulated device's memory: storage of the host that torch takes for the device's.

DLPack describes a tensor by a pointer, sizes and strides, and names the device that the pointer
belongs to. With another device in that description, the same memory becomes a tensor of the
simulated device: with a real storage and real views, but out of reach of the CPU's kernels.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

CPU = 1  # DLPack's number of the CPU
EXTENSION = 12  # DLPack's number of torch's PrivateUse1 device
DEVICE_TYPE_OFFSET = 8  # of the field in DLPack's structure: a pointer to the data comes first
LACKING = {torch.float64, torch.complex128}  # dtypes; one variant of the device has all of them


class Allocated:
    """The bytes of the device's tensors, for a variant that reports them."""

    def __init__(self) -> None:
        self.is_counted = False
        self.size = 0
        self.peak = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        size = storage.nbytes()
        self.size += size
        self.peak = max(self.peak, self.size)
        weakref.finalize(storage, self.subtract, size).atexit = False

    def subtract(self, size: int) -> None:
        """Stop counting a storage."""
        self.size -= size

    def reset_peak(self) -> None:
        """Set the peak to the current size."""
        self.peak = self.size


ALLOCATED = Allocated()
pointer_of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of_capsule.restype = ctypes.c_void_p
pointer_of_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]

CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def relabel(tensor: torch.Tensor, device_type: int) -> torch.Tensor:
    """Return a tensor of the same memory that belongs to another device."""
    capsule = torch._C._to_dlpack(tensor)
    address = pointer_of_capsule(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + DEVICE_TYPE_OFFSET).value = device_type
    relabelled = torch._C._from_dlpack(capsule)
    if relabelled.stride() != tensor.stride():  # DLPack normalises strides of dimensions of size 1
        return view(torch.ops.aten.as_strided.default, relabelled, tensor.size(), tensor.stride())
    return relabelled


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of the device as a tensor of the CPU."""
    return relabel(tensor.detach() if tensor.requires_grad else tensor, CPU)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of the CPU as a tensor of the device.

    Raises:
        TypeError: the device lacks the dtype.
    """
    refuse(tensor.dtype)
    if ALLOCATED.is_counted:
        ALLOCATED.add(tensor.untyped_storage())
    return relabel(tensor, EXTENSION)


def refuse(dtype: torch.dtype | None) -> None:
    """Raise a `TypeError` for a dtype that the device lacks, as torch does for Apple's MPS."""
    if dtype in LACKING:
        raise TypeError(
            f"Cannot convert a simulated Tensor to {dtype} dtype as the simulated device doesn't "
            "support it. Please use float32 instead."
        )


def view(operation: torch._ops.OpOverload, *arguments: object, **options: object) -> torch.Tensor:
    """Call the CPU's kernel of a view, which only computes sizes and strides."""
    return operation.redispatch(CPU_KERNELS, *arguments, **options)


def resize(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor of the device the memory, sizes and strides of another one, `values`."""
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KERNELS,
        tensor,
        values.untyped_storage(),
        values.storage_offset(),
        values.size(),
        values.stride(),
    )
