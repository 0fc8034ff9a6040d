"""Collectives of the simulated device: gloo's, which refuse tensors of the host as NCCL does.

A process group of this backend knows the simulated device alone. torch itself then refuses all
other tensors, with the same error as for NCCL.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch.utils._pytree import tree_map_only

from tests.simulated import memory, streams
from tests.simulated.kernels import DEVICE, LIBRARIES

COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "scatter_",
    "gather_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "send",
    "recv_",
)
CALLED: Counter[str] = Counter()  # collectives, by name
HOST_GROUPS: dict[Any, Any] = {}  # by gloo's part of a group: the group that serves the host


def register() -> None:
    """Register the backend, the collectives of the device, and Accelerate's use of both."""
    distributed.Backend.register_backend(DEVICE, create, devices=[DEVICE])
    library = torch.library.Library("c10d", "IMPL")
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    for name in COLLECTIVES:
        operation = getattr(torch.ops.c10d, name).default
        library.impl(name, on_memory(operation), "PrivateUse1", allow_override=True)
    LIBRARIES.append(library)
    teach_accelerate()


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the part of a process group that serves the device: gloo."""
    gloo = distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group = distributed.ProcessGroup(store, rank, size)
    cpu = torch.device("cpu")
    group._register_backend(cpu, distributed.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)
    HOST_GROUPS[gloo] = group
    return gloo


# For these, NCCL compares only the numbers of elements, whereas gloo compares the shapes.
OF_FLAT_TENSORS = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}


def on_memory(operation: torch._ops.OpOverload) -> Any:
    """Return a collective that lets gloo work on the device's memory."""

    is_flat = operation._schema.name in OF_FLAT_TENSORS

    def lend(tensor: torch.Tensor) -> torch.Tensor:
        on_host = memory.on_host(tensor)
        return on_host.view(-1) if is_flat else on_host

    def lend_group(value: Any) -> Any:
        if not isinstance(value, torch.ScriptObject):
            return value
        try:
            group = distributed.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):  # another object, such as the kind of a reduction
            return value
        return HOST_GROUPS[group._get_backend(torch.device(DEVICE))].boxed()

    def call(*arguments: Any, **options: Any) -> Any:
        CALLED[operation._schema.name] += 1
        streams.current_stream().run()
        lent, lent_options = tree_map_only(torch.Tensor, lend, (arguments, options))
        returned = operation(*map(lend_group, lent), **lent_options)
        if isinstance(returned, tuple):  # the tensors, and an object that waits for them
            *tensors, work = returned
            device_tensors = [arguments[number] for number in range(len(tensors))]
            return (*device_tensors, work)
        return returned

    return call


def teach_accelerate() -> None:
    """Let Accelerate take several processes on this device for a distributed type it knows."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    prepare: Any = PartialState._prepare_backend

    def prepare_backend(state: Any, cpu: bool = False, *others: Any) -> Any:
        if "LOCAL_RANK" in os.environ and not cpu:
            return DEVICE, DistributedType.MULTI_NPU
        return prepare(state, cpu, *others)

    state_class: Any = PartialState
    state_class._prepare_backend = prepare_backend
    # Accelerate then gives DDP no device numbers: each process has one device, with the number 0.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
