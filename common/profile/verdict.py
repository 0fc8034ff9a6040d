"""The verdict of a profile: where the time of an update goes, what bounds it, what to change."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from common.config import Precision, TrainingConfig

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

# The name of the range in which the loop waits for a batch; see `common.profile.waits`.
DATA = "data"

# Matrix products, convolutions and attention, by the names of PyTorch's operations and of the
# kernels of cuBLAS, cuDNN, CUTLASS and FlashAttention.
ARITHMETIC = re.compile(
    r"::_?(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|scaled_mm|_addmm_activation)$"
    r"|(::|_)linear|convolution|conv[123]d|attention|gemm|gemv|cutlass|xmma|nvjet|[wd]grad|fprop"
    r"|winograd|implicit_con|flash|fmha",
    re.IGNORECASE,
)
# Operations that do no work of their own. All of their own time is the cost of calling them.
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


class Judgement(TypedDict):
    """The verdict on the speed of a run; part of `verdict.json`."""

    verdict: str  # the part of `UpdateCost` that bounds the speed, such as "data-bound"
    evidence: str
    advice: str
    milliseconds_per_update: dict[str, float]  # by part of `UpdateCost`, and their total
    shares: dict[str, float]  # the share of each part


def cost_category(name: str) -> str:
    """Return the part of `UpdateCost` that an operation on a CPU belongs to, by its name."""
    # Compiled code is one event. Its fused kernels save memory traffic but are still memory-bound.
    if "CompiledFx" in name or name.startswith("Torch-Compiled Region"):
        return "memory"
    if not name.startswith(("aten::", "mkldnn", "onednn")) or BOOKKEEPING.fullmatch(name):
        return "launch"
    return "compute" if ARITHMETIC.search(name) else "memory"


def cpu_kernel_milliseconds(events: "Sequence[FunctionEvent]") -> dict[str, float]:
    """Return the milliseconds that a CPU spends in "memory" and "compute" operations.

    Only the training thread counts, and only while it does not wait for data.

    Args:
        events: the profiler's events; each counts with its own time, without that of its children.
    """
    training_threads = {event.thread for event in events if event.name.startswith("ProfilerStep")}
    totals = {"memory": 0.0, "compute": 0.0}
    for event in events:
        if event.thread not in training_threads or waits_for_data(event):
            continue
        category = cost_category(event.name)
        # "launch" is not among the totals: `cost_of_update` computes its time as what is left.
        if category in totals:
            totals[category] += event.self_cpu_time_total / 1000
    return totals


def waits_for_data(event: "FunctionEvent | None") -> bool:
    """Whether an event lies inside a range in which the loop waits for a batch."""
    while event is not None:
        if event.name == DATA:
            return True
        event = event.cpu_parent
    return False


def gpu_kernel_milliseconds(events: "Sequence[FunctionEvent]") -> dict[str, float]:
    """Return the milliseconds that a GPU spends in "memory" and "compute" kernels and copies.

    NCCL's kernels are left out, because they mostly wait for other ranks.
    """
    totals = {"memory": 0.0, "compute": 0.0}
    for event in events:
        if is_kernel(event) and "nccl" not in event.name.lower():
            category = "compute" if ARITHMETIC.search(event.name) else "memory"
            totals[category] += event.time_range.elapsed_us() / 1000
    return totals


def is_kernel(event: "FunctionEvent") -> bool:
    """Whether an event of the profiler is a kernel or a copy on a device.

    Annotations are shown on the device as well, but they span idle time.
    """
    return event.device_type.name != "CPU" and not event.is_user_annotation


def cost_of_update(
    kernels: dict[str, float], busy: float, data: float, *, is_asynchronous: bool
) -> UpdateCost:
    """Split the time of one update into its parts; all times are in milliseconds.

    Kernels are timed with the profiler on, and the update without it, because the profiler slows
    launches down.

    Args:
        kernels: the time of one profiled update in "memory" and in "compute" kernels.
        busy: the time of one update that was not profiled, without `data`.
        data: the time for which the loop waits for the update's batches.
        is_asynchronous: whether the device may run kernels while the loop waits.
    """
    whole = busy + data
    time_for_kernels = whole if is_asynchronous else busy
    # If the kernels take longer than `time_for_kernels`, the profiler slowed them down.
    scale = min(1.0, time_for_kernels / max(sum(kernels.values()), 1e-9))
    memory = kernels["memory"] * scale
    compute = kernels["compute"] * scale
    idle = max(0.0, whole - memory - compute)
    waiting = min(data, idle)
    return UpdateCost(data=waiting, launch=idle - waiting, memory=memory, compute=compute)


def judge(
    cost: UpdateCost,
    config: TrainingConfig,
    precision: Precision,
    placement: str,
    processes: int = 1,
) -> Judgement:
    """Return the verdict, its evidence and advice: the largest part of an update bounds its speed.

    Args:
        cost: where the time of an update goes.
        config: the flags that the run has.
        precision: as Accelerate names it, which calls TF32 "no".
        placement: where batches are made, "device" or "workers".
        processes: how many ranks train.
    """
    others = " and waiting for other processes" if processes > 1 else ""
    descriptions = {
        "data": "waiting for data",
        "launch": f"Python and launches{others}, with no kernel running",
        "memory": "element-wise operations, normalisation and copies",
        "compute": "matrix products and convolutions",
    }
    milliseconds = cost._asdict()
    total = max(sum(cost), 1e-9)
    shares = {part: value / total for part, value in milliseconds.items()}
    largest_first = sorted(milliseconds, key=lambda part: -milliseconds[part])
    evidence = ", ".join(f"{descriptions[part]} {shares[part]:.0%}" for part in largest_first)
    largest = largest_first[0]
    return {
        "verdict": f"{largest}-bound",
        "evidence": f"of {total:,.2f} ms an update, {evidence}",
        "advice": advice(largest, config, precision, placement),
        "milliseconds_per_update": {**milliseconds, "total": total},
        "shares": shares,
    }


def advice(largest: str, config: TrainingConfig, precision: Precision, placement: str) -> str:
    """Return advice, such as a flag to change, that shortens the largest part of an update."""
    if largest == "data" and placement == "device":
        return (
            "Try --data-placement workers --num-workers N, which makes batches in other "
            "processes; or make the transform cheaper"
        )
    if largest == "data":
        return "Try a higher --num-workers, or --data-placement device if the data fit in memory"
    if largest == "launch":
        compile_flag = "" if config.compile else "; or --compile"
        batch_size = 2 * config.batch_size
        return f"Try --batch-size {batch_size}, which doubles the work of a launch{compile_flag}"
    if precision == "no":
        return (
            "Try --mixed-precision fp16 on a GPU, or bf16 where the processor has instructions "
            "for it"
        )
    if largest == "memory" and not config.compile:
        return "Try --compile, which fuses such operations"
    if largest == "memory":
        return "No flag helps further: use fewer or cheaper such operations in the model"
    return "No flag helps further: the time goes to useful arithmetic. Add devices to go faster"
