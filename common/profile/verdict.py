"""Where the time of an update goes, by the profiler's events, and what bounds its speed."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.config import TrainingConfig

# The record of what is done while the loop waits for a batch; see `common.profile.profiler`.
DATA = "data"

# Matrix products, convolutions and attention, by the names of PyTorch's operations and of the
# kernels of cuBLAS, cuDNN, CUTLASS and FlashAttention.
ARITHMETIC = re.compile(
    r"::_?(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|scaled_mm|_addmm_activation)$"
    r"|(::|_)linear|convolution|conv[123]d|attention|gemm|gemv|cutlass|xmma|nvjet|[wd]grad|fprop"
    r"|winograd|implicit_con|flash|fmha",
    re.IGNORECASE,
)
# Operations that move no data: all of their time is the price of calling them.
BOOKKEEPING = re.compile(
    r"aten::(_unsafe_view|view(_as)?|_?reshape(_alias)?|t|transpose|permute|as_strided|expand(_as)?"
    r"|(un)?squeeze|select|slice|narrow|split(_with_sizes)?|unbind|chunk|detach_?|alias"
    r"|(un)?flatten|lift_fresh|resolve_(conj|neg)|(new_)?empty|empty_(like|strided)|resize_|set_"
    r"|result_type|to|_to_copy|contiguous|clone|(zeros|ones|full)(_like)?|item|_local_scalar_dense"
    r"|is_nonzero|linear|matmul)"
)


class UpdateCost(NamedTuple):
    """Where the time of one optimizer update goes, in milliseconds; the parts add up to it."""

    data: float  # waiting for batches
    launch: float  # Python, the framework and launches, while no kernel runs
    memory: float  # element-wise operations, normalisation, reductions, copies, the optimizer
    compute: float  # matrix products, convolutions, attention


def kind_of(name: str) -> str:
    """Return the part of an update that an operation of the CPU belongs to, by its name."""
    # Compiled code is one event around fused kernels, which save traffic and stay bound by it.
    if "CompiledFx" in name or name.startswith("Torch-Compiled Region"):
        return "memory"
    if not name.startswith(("aten::", "mkldnn", "onednn")) or BOOKKEEPING.fullmatch(name):
        return "launch"
    return "compute" if ARITHMETIC.search(name) else "memory"


def cpu_kernel_milliseconds(events: Sequence[Any]) -> dict[str, float]:
    """Sum the own time of operations on a CPU's training thread, but while it waits for data."""
    threads = {event.thread for event in events if event.name.startswith("ProfilerStep")}
    sums = {"memory": 0.0, "compute": 0.0, "launch": 0.0}
    for event in events:
        if event.thread in threads and not waits_for_data(event):
            sums[kind_of(event.name)] += event.self_cpu_time_total / 1000
    del sums["launch"]  # it is what the kernels leave
    return sums


def waits_for_data(event: Any) -> bool:
    while event is not None and event.name != DATA:
        event = event.cpu_parent
    return event is not None


def gpu_kernel_milliseconds(events: Sequence[Any]) -> dict[str, float]:
    """Sum the time of a GPU's kernels and copies; NCCL's mostly wait for other ranks."""
    sums = {"memory": 0.0, "compute": 0.0}
    for event in events:
        is_kernel = event.device_type.name != "CPU" and not event.is_user_annotation
        if is_kernel and "nccl" not in event.name.lower():
            kind = "compute" if ARITHMETIC.search(event.name) else "memory"
            sums[kind] += event.time_range.elapsed_us() / 1000
    return sums


def cost_of_update(
    kernels: dict[str, float], rest: float, data: float, *, is_asynchronous: bool
) -> UpdateCost:
    """Split the time of an update; all in milliseconds.

    Args:
        kernels: of the profiled updates, by kind.
        rest: of an update that was not profiled, whose launches take longer, less its `data`.
        data: that the loop waits for batches; the device may be busy if it `is_asynchronous`.
    """
    whole = rest + data
    room = whole if is_asynchronous else rest
    # More than there is room for were slowed by the profiler.
    scale = min(1.0, room / max(sum(kernels.values()), 1e-9))
    memory, compute = kernels["memory"] * scale, kernels["compute"] * scale
    idle = max(0.0, whole - memory - compute)
    waiting = min(data, idle)
    return UpdateCost(waiting, idle - waiting, memory, compute)


def judge(
    cost: UpdateCost, config: TrainingConfig, precision: str, placement: str, processes: int = 1
) -> dict[str, Any]:
    """Return what `profile/verdict.json` holds: the largest part of an update bounds its speed."""
    others = " and waiting for other processes" if processes > 1 else ""
    words = {
        "data": "waiting for data",
        "launch": f"Python and launches{others}, with no kernel running",
        "memory": "element-wise operations, normalisation and copies",
        "compute": "matrix products and convolutions",
    }
    parts, total = cost._asdict(), max(sum(cost), 1e-9)
    shares = {name: value / total for name, value in parts.items()}
    order = sorted(parts, key=lambda name: -parts[name])
    shown = ", ".join(f"{words[name]} {shares[name]:.0%}" for name in order)
    return {
        "verdict": f"{order[0]}-bound",
        "evidence": f"of {total:,.2f} ms an update, {shown}",
        "advice": advice(order[0], config, precision, placement),
        "milliseconds_per_update": {**parts, "total": total},
        "shares": shares,
    }


def advice(largest: str, config: TrainingConfig, precision: str, placement: str) -> str:
    if largest == "data" and placement == "device":
        elsewhere = (
            "--data-placement workers --num-workers N, which makes batches in other processes"
        )
        return f"Turn: {elsewhere}; or make the transform cheaper"
    if largest == "data":
        return "Turn: --num-workers up, or --data-placement device if the data fits in its memory"
    if largest == "launch":
        fused = "" if config.compile else "; or --compile"
        return f"Turn: --batch-size {2 * config.batch_size}, twice the work of each launch{fused}"
    if precision == "no":
        where = "on a GPU, or bf16 where the processor has instructions for it"
        return f"Turn: --mixed-precision fp16 {where}"
    if largest == "memory" and not config.compile:
        return "Turn: --compile, which fuses such operations"
    if largest == "memory":
        return "No flag is left to turn: fewer or cheaper such operations in the model"
    return "No flag is left to turn: this is what the hardware is for. Add devices to go faster"
