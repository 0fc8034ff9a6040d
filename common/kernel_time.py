"""How much of the time was spent in kernels, and in which kind: from the profiler's events."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# The record of what is done while the loop waits for a batch; see `common.profiling`.
DATA = "waiting for data"

# Matrix products, convolutions and attention, by the names of PyTorch's operations and of the
# kernels of cuBLAS, cuDNN, CUTLASS and FlashAttention.
ARITHMETIC = re.compile(
    r"::_?(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|scaled_mm|_addmm_activation)$"
    r"|(::|_)linear|convolution|conv[123]d|attention|gemm|gemv|cutlass|xmma|nvjet|[wd]grad|fprop"
    r"|winograd|implicit_con|flash|fmha",
    re.IGNORECASE,
)
# Operations that move no data: all of their time is the price of calling them.
BOOKKEEPING = frozenset(
    "aten::" + name
    for name in (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute"),
        *("as_strided", "expand", "expand_as", "view_as", "unsqueeze", "squeeze", "select"),
        *("slice", "narrow", "split", "split_with_sizes", "unbind", "chunk", "detach", "detach_"),
        *("alias", "flatten", "unflatten", "lift_fresh", "resolve_conj", "resolve_neg"),
        *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "result_type"),
        *("to", "_to_copy", "contiguous", "clone", "zeros", "zeros_like", "ones", "ones_like"),
        *("full", "full_like", "item", "_local_scalar_dense", "is_nonzero", "linear", "matmul"),
    )
)


def kind_of(name: str) -> str:
    """Return the part of an update that an operation of the CPU belongs to, by its name."""
    if name in BOOKKEEPING:
        return "launch"
    return "compute" if ARITHMETIC.search(name) else "memory"


def cpu_kernel_milliseconds(events: Iterable[Any]) -> dict[str, float]:
    """Sum the time of operations on the training thread of a CPU, by kind.

    Args:
        events: of `torch.profiler`. An operation's own time counts, without those that it calls;
            what happens while the loop waits for a batch, and between operations, does not.
    """
    events = list(events)
    threads = {event.thread for event in events if event.name.startswith("ProfilerStep")}
    sums = {"memory": 0.0, "compute": 0.0}
    for event in events:
        if event.thread not in threads or waits_for_data(event):
            continue
        # Compiled code is one event around fused kernels, which save traffic and stay bound by it.
        compiled = "CompiledFx" in event.name or event.name.startswith("Torch-Compiled Region")
        is_operation = event.name.startswith(("aten::", "mkldnn", "onednn"))
        if is_operation or compiled:
            kind = "memory" if compiled else kind_of(event.name)
            if kind in sums:
                sums[kind] += event.self_cpu_time_total / 1000
    return sums


def waits_for_data(event: Any) -> bool:
    """Whether an event is part of making a batch."""
    while event is not None:
        if event.name == DATA:
            return True
        event = event.cpu_parent
    return False


def gpu_kernel_milliseconds(events: Iterable[Any]) -> dict[str, float]:
    """Sum the time of kernels and copies on a GPU, by kind.

    Args:
        events: of `torch.profiler`; those on the host don't count. Kernels that run at the same
            time, on several streams, all do. Those of NCCL mostly wait for other ranks.
    """
    sums = {"memory": 0.0, "compute": 0.0}
    for event in events:
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        if "nccl" not in event.name.lower():
            kind = "compute" if ARITHMETIC.search(event.name) else "memory"
            sums[kind] += event.time_range.elapsed_us() / 1000
    return sums
