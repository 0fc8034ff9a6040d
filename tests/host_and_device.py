"""Run a script as if its CPU were a device whose collectives refuse tensors of the host.

python tests/host_and_device.py SCRIPT FLAGS...

NCCL takes only tensors on its device. Gloo, which works on a CPU, takes all tensors there. To find
tensors that NCCL would refuse, this script tells the tensors of the device and of the host apart.
The Accelerator's device is "cpu:0". A tensor is on it if it was made or moved there by that name,
or was computed from such a tensor. "cpu" without a number is the host. A collective that is called
from outside of torch raises for a tensor of the host. Collectives that torch itself calls, as DDP
does, are not checked.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")
DEVICE = torch.device("cpu", 0)
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
)


class HostAndDevice(TorchFunctionMode):
    """Keeps track of which memory belongs to the device."""

    def __init__(self) -> None:
        super().__init__()
        # By address. The weak reference keeps the address from being used again.
        self.storages: dict[int, StorageWeakRef] = {}

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the device's."""
        return storage_of(tensor)._cdata in self.storages

    def put_on_device(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory as the device's."""
        storage = storage_of(tensor)
        self.storages[storage._cdata] = StorageWeakRef(storage)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Call a function of torch, and note whether its results are on the device."""
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        inputs = [*tensors_in((arguments, keywords))]
        device = device_asked_for(function, arguments, keywords)
        if device == HOST:
            is_on_device = isinstance(result, torch.Tensor) and self.is_on_device(result)
            return result.clone() if is_on_device else result
        input_storages = {storage_of(tensor)._cdata for tensor in inputs}
        if device == DEVICE or any(map(self.is_on_device, inputs)):
            for tensor in tensors_in(result):
                is_view_or_input = storage_of(tensor)._cdata in input_storages
                if not is_view_or_input:
                    self.put_on_device(tensor)
        return result

    def follow_shards(self) -> None:
        """Count what `fully_shard` has moved to the device of its mesh as the device's."""
        from torch.distributed import fsdp

        fully_shard = fsdp.fully_shard

        def sharded(module: torch.nn.Module, **options: Any) -> Any:
            fully_shard(module, **options)
            for tensor in (*module.parameters(), *module.buffers()):
                self.put_on_device(tensor)
            return module

        setattr(fsdp, "fully_shard", sharded)  # noqa: B010

    def refusing(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that raises for the host's tensors."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            caller = str(sys._getframe(1).f_globals["__name__"])
            if not caller.startswith("torch."):
                CALLERS.add(f"{collective.__name__} from {caller}")
                with torch._C.DisableTorchFunction():
                    for tensor in tensors_in((arguments, keywords)):
                        if not self.is_on_device(tensor):
                            raise RuntimeError(
                                f"{caller} called {collective.__name__} with a tensor of the host, "
                                f"of shape {tuple(tensor.shape)}"
                            )
            return collective(*arguments, **keywords)

        return call


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor, or of this rank's rows of it."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()


def tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from tensors_in([*nest.values()])
    elif isinstance(nest, Iterable) and not isinstance(nest, str | bytes):
        for item in nest if isinstance(nest, list | tuple) else ():
            yield from tensors_in(item)


def device_asked_for(function: Any, arguments: Any, keywords: Any) -> torch.device | None:
    """Return the device that a call names for its result, if it names one."""
    if function is torch.Tensor.cpu:
        return HOST
    device = keywords.get("device")
    if device is None and function is torch.Tensor.to and len(arguments) > 1:
        target = arguments[1]  # a device, a dtype, or another tensor
        device = target if isinstance(target, str | torch.device) else None
    return None if device is None else torch.device(device)


CALLERS: set[str] = set()

if __name__ == "__main__":
    mode = HostAndDevice()
    for name in COLLECTIVES:
        setattr(torch.distributed, name, mode.refusing(getattr(torch.distributed, name)))
    Accelerator.device = property(lambda self: DEVICE)  # type: ignore[method-assign, assignment]
    if "ACCELERATE_USE_FSDP" in os.environ:
        mode.follow_shards()
    sys.argv = sys.argv[1:]
    with mode:
        runpy.run_path(sys.argv[0], run_name="__main__")
    print("\n".join(sorted(CALLERS)))
