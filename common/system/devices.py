"""The capabilities of a device, found by asking or trying it, and never concluded from its name.

Each function takes a `torch.device` and works for a CPU, a GPU of any vendor, and a backend that
lives outside of torch. A capability for which torch has no query is tried once, on a tiny tensor,
and the answer is remembered. The module of a device (``torch.cuda``, ``torch.mps``) may lack any
function: the device then lacks the capability.
"""

import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ParamSpec

import torch
from torch.optim import Optimizer

from common.system import machine

# What torch raises if a device lacks something. The type differs by backend: float64 on MPS, for
# example, is a TypeError.
LACKING = (AttributeError, AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)

# A variable that users may set, and that `accelerate launch` sets to a word for yes or no.
ASKS_FOR_CPU = "ACCELERATE_USE_CPU"

# The answers of `tried_once` functions, by the function's name and its arguments.
ANSWERS: dict[tuple[Any, ...], bool] = {}
Arguments = ParamSpec("Arguments")


def tried_once(function: Callable[Arguments, bool]) -> Callable[Arguments, bool]:
    """Call a function once for the same positional arguments, and remember its answer."""

    @functools.wraps(function)
    def answer(*arguments: Arguments.args, **named: Arguments.kwargs) -> bool:
        key = (function.__name__, *arguments)
        if key not in ANSWERS:
            ANSWERS[key] = function(*arguments, **named)
        return ANSWERS[key]

    return answer


# --- which device


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` computes and is not the CPU; its memory may be the CPU's."""
    return device.type not in ("cpu", "meta")


def is_cpu_asked_for() -> bool:
    """Whether the environment or the launcher asks for the CPU, beside an accelerator."""
    return os.environ.get(ASKS_FOR_CPU, "").lower() in machine.TRUE_WORDS


def default_device() -> torch.device:
    """Return the accelerator of this process, by its number.

    It is the CPU where there is no accelerator, or where the CPU is asked for.
    """
    if is_cpu_asked_for():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return indexed(accelerator)


def indexed(device: torch.device) -> torch.device:
    """Return `device` with its index, because ``cuda`` and ``cuda:0`` compare unequal."""
    if not is_accelerator(device) or device.index is not None:
        return device
    try:
        return torch.device(device.type, torch.accelerator.current_device_index())
    except LACKING:
        return torch.device(device.type, 0)


def device_module(device: torch.device) -> ModuleType | None:
    """Return torch's module for this type of device, such as ``torch.cuda``; None if none."""
    try:
        return torch.get_device_module(device)
    except LACKING:
        return None


def function_of(device: torch.device, *names: str) -> Callable[..., Any] | None:
    """Return the first of these functions that the module of `device` has."""
    module = device_module(device)
    for name in names:
        function = getattr(module, name, None)
        if callable(function):
            return function
    return None


def device_name(device: torch.device) -> str:
    """Return the name of the hardware, such as "NVIDIA H100 80GB HBM3".

    An accelerator without a known name is called by its type and the machine's processor.
    """
    if not is_accelerator(device):
        return f"{machine.processor_name()}, {machine.usable_cores()} cores"
    name = asked(device, "get_device_name", "get_name")
    return str(name) if name else f"{device.type} of {machine.processor_name()}"


def asked(device: torch.device, *names: str) -> Any:
    """Call the first of these functions that the device's module has; None if it lacks them."""
    function = function_of(device, *names)
    if function is None:
        return None
    try:
        return function(device)
    except LACKING:
        return None


def use(device: torch.device) -> None:
    """Make `device` this thread's current one; a new thread begins with the first device."""
    if is_accelerator(device) and device_count(device) > 1:
        torch.accelerator.set_device_index(indexed(device))


def device_count(device: torch.device) -> int:
    count = function_of(device, "device_count")
    return int(count()) if count is not None else 1


# --- numbers


@tried_once
def has_float64(device: torch.device) -> bool:
    """Whether float64 tensors can be made and added up on `device`."""
    try:
        total = torch.ones(2, device=device).sum(dtype=torch.float64)
        return float(total + torch.zeros((), dtype=torch.float64, device=device)) == 2.0
    except LACKING:
        return False


@tried_once
def has_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matrix product under autocast to `dtype` (fp16 or bf16) really runs in it.

    A device that would only emulate bf16, and says so, does not have it.
    """
    if dtype is torch.bfloat16 and not has_native_bf16(device):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns, and goes on in fp32
            matrix = torch.ones((8, 8), device=device)
            with torch.autocast(device.type, dtype=dtype):
                return (matrix @ matrix).dtype == dtype
    except LACKING:
        return False


def has_native_bf16(device: torch.device) -> bool:
    """Whether bf16 is native as far as is known: false if the device says that it emulates it."""
    is_supported = function_of(device, "is_bf16_supported")
    if is_supported is None:
        return True
    try:
        return bool(is_supported(including_emulation=False))
    except TypeError:
        return bool(is_supported())


def has_tf32(device: torch.device) -> bool:
    """Whether fp32 matrix products on `device` can run in TF32."""
    is_supported = function_of(device, "is_tf32_supported")
    return is_supported is not None and bool(is_supported())


# --- optimizers


@tried_once
def has_loss_scaling(device: torch.device) -> bool:
    """Whether `device` has the operations of fp16's loss scale: unscale gradients, adapt it."""
    try:
        gradient = torch.full((2,), 8.0, device=device)
        overflow = torch.zeros((), device=device)
        scale = torch.full((), 4.0, device=device)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], overflow, scale.reciprocal())
        torch._amp_update_scale_(scale, tracker, overflow, 2.0, 0.5, 1)
        return float(gradient[0]) == 2.0 and float(scale) == 8.0 and float(overflow) == 0.0
    except LACKING:
        return False


def honours_scaling(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a fused step of this optimizer on `device` obeys `grad_scale` and `found_inf`.

    A fused step that ignores them would apply updates that are to be skipped. It is tried once for
    each kind of optimizer, device and options, on a parameter of its own. An option that is a
    tensor keeps its default in that trial.
    """
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = tuple(
        (name, value)
        for name, value in sorted(optimizer.param_groups[0].items())
        if name in accepted and isinstance(value, (bool, float, int, str, tuple))
    )
    return fused_step_honours_scaling(kind, indexed(device), options)


@tried_once
def fused_step_honours_scaling(
    kind: type[Optimizer], device: torch.device, options: tuple[tuple[str, Any], ...] = ()
) -> bool:
    """Try fused steps with `found_inf`, which must change nothing, and with `grad_scale`.

    The latter must do what steps with the gradients divided by the scales do.
    """
    start = 1.0
    named = {**dict(options), "fused": True, "lr": 0.5}
    named.pop("foreach", None)  # the other way than fused
    try:
        skipped = after_fused_steps(kind, device, named, [(1.0, 1.0), (0.5, 1.0)], found_inf=1.0)
        # Adam's steps would be the same with all gradients multiplied by one scale.
        scaled = after_fused_steps(kind, device, named, [(1.0, 1.0), (4.0, 8.0)], found_inf=0.0)
        plain = after_fused_steps(kind, device, named, [(1.0, 1.0), (0.5, 1.0)], found_inf=0.0)
    except LACKING:
        return False
    return skipped == start != plain and math.isclose(scaled, plain, rel_tol=1e-5)


def after_fused_steps(
    kind: Any,
    device: torch.device,
    options: Mapping[str, Any],
    steps: Sequence[tuple[float, float]],
    found_inf: float,
) -> float:
    """Return what becomes of a parameter of 1 by steps of (gradient, scale)."""
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = kind([parameter], **options)
    for gradient, scale in steps:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.grad_scale = torch.full((), scale, device=device)
        optimizer.found_inf = torch.full((), found_inf, device=device)
        optimizer.step()
    return float(parameter.detach()[0])


@tried_once
def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile's Inductor makes kernels for `device`."""
    try:
        from torch._inductor.codegen import common as codegen

        codegen.init_backend_registration()
        return codegen.get_scheduling_for_device(device.type) is not None
    except (AttributeError, ImportError):
        return True  # another version of torch, which says itself what it can't compile


def has_compiled_graphs(device: torch.device) -> bool:
    """Whether torch.compile records a model's kernels on `device` to launch them as one graph.

    It does so with CUDA graphs alone.
    """
    return device.type == "cuda"


# --- streams, events and copies


@tried_once
def has_streams(device: torch.device) -> bool:
    """Whether work can be queued on a second stream of `device`, and waited for by an event."""
    if not is_accelerator(device):
        return False
    try:
        current = current_stream(device)
        stream = new_stream(device)
        stream.wait_stream(current)
        with on_stream(stream):
            event = stream.record_event()
        current.wait_event(event)
        event.synchronize()
        stream.synchronize()
        torch.ones(1, device=device).record_stream(stream)
    except LACKING:
        return False
    # A device with one stream may hand that out as a new one.
    return stream.stream_id != current.stream_id


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of a device that `has_streams`."""
    return torch.Stream(device=device)


def on_stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Return a context in which work is queued on `stream`."""
    return stream


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(indexed(device))


@tried_once
def has_timed_events(device: torch.device) -> bool:
    """Whether events on the stream of `device` tell the milliseconds between them."""
    if not is_accelerator(device):
        return False
    try:
        first = recorded_event(device)
        last = recorded_event(device)
        last.synchronize()
        return first.elapsed_time(last) >= 0
    except LACKING:
        return False


def recorded_event(device: torch.device) -> torch.Event:
    """Return an event that marks the present point of the current stream, and its time."""
    event = torch.Event(device=device, enable_timing=True)
    event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait for all work on all streams of `device`.

    A device that offers no way to wait for it is taken to have done its work when it was called.
    """
    if not is_accelerator(device):
        return
    wait = function_of(device, "synchronize")
    if wait is None:
        if can_be_awaited(device):
            torch.accelerator.synchronize(indexed(device))
    elif device_count(device) > 1:
        with current_device(device):
            wait()
    else:
        wait()


@tried_once
def can_be_awaited(device: torch.device) -> bool:
    """Whether ``torch.accelerator`` can wait for `device`."""
    try:
        torch.accelerator.synchronize(indexed(device))
    except LACKING:
        return False
    return True


def synchronize_stream(device: torch.device) -> None:
    """Wait for the work on the current stream of `device`, and for no other stream if it has any.

    A checkpoint that is being copied on a stream of its own is not waited for.
    """
    if not is_accelerator(device):
        return
    if has_streams(device):
        current_stream(device).synchronize()
    else:
        synchronize(device)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current one of its kind."""
    if is_accelerator(device) and device_count(device) > 1:
        return torch.accelerator.device_index(indexed(device).index)
    return nullcontext()


@tried_once
def has_pinned_memory(device: torch.device) -> bool:
    """Whether memory of the host can be pinned for copies to `device` that the host need not await.

    Without it, a copy with ``non_blocking=True`` may read memory that has changed since. A device
    without streams of its own, such as Apple's, is taken to lack it: its host memory allocator may
    hand pinned memory out again before a copy has read it.
    """
    if not has_streams(device):
        return False
    try:
        pinned = torch.ones(2).pin_memory()
        if not pinned.is_pinned() or pinned.device.type != "cpu":
            return False
        arrived = pinned.to(device, non_blocking=True)
        return float(arrived.sum()) == 2.0
    except LACKING:
        return False


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to `device`, without a wait of the host where the device can."""
    if not has_pinned_memory(device):
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def profiler_activity(device: torch.device) -> torch.profiler.ProfilerActivity | None:
    """Return what has torch's profiler time the kernels of `device`; None if it can't.

    The profiler takes any backend from outside of torch, whether or not it can time its kernels.
    """
    if not is_accelerator(device) or device.type == torch._C._get_privateuse1_backend_name():
        return None
    activity = torch.profiler.ProfilerActivity.__members__.get(device.type.upper())
    return activity if activity in torch.profiler.supported_activities() else None


# --- memory


def has_own_memory_figures(device: torch.device) -> bool:
    """Whether `device` says how much of its memory tensors take."""
    return allocated_bytes(device) is not None


def keeps_peaks(device: torch.device) -> bool:
    """Whether `device` keeps the highest number of bytes that tensors took."""
    return peak_bytes(device) is not None


def memory_room(device: torch.device) -> tuple[int, int] | None:
    """Return the free bytes and all bytes of the memory of `device`, or None if it doesn't say."""
    if not is_accelerator(device):
        return None
    room = asked(device, "mem_get_info")
    if room is None and is_known_to_torch(device):
        room = answered(torch.accelerator.get_memory_info, device)
    if room is not None:
        free, total = room
        return int(free), int(total)
    recommended = asked_without_device(device, "recommended_max_memory")  # of Apple's GPUs
    taken = asked_without_device(device, "driver_allocated_memory")
    if recommended is None or taken is None:
        return None
    return max(0, int(recommended) - int(taken)), int(recommended)


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors on `device` take, or None if it doesn't say."""
    if not is_accelerator(device):
        return None
    size = asked(device, "memory_allocated")
    if size is None:
        size = asked_without_device(device, "current_allocated_memory")
    if size is None:
        size = memory_stats(device).get("allocated_bytes.all.current")
    return None if size is None else int(size)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the most bytes allocated and reserved since `reset_peaks`; None if it keeps none.

    What the allocator of a device reserved is 0 where the device doesn't say.
    """
    if not is_accelerator(device):
        return None
    allocated = asked(device, "max_memory_allocated")
    reserved = asked(device, "max_memory_reserved")
    if allocated is None:
        stats = memory_stats(device)
        allocated = stats.get("allocated_bytes.all.peak")
        reserved = stats.get("reserved_bytes.all.peak")
    return None if allocated is None else (int(allocated), int(reserved or 0))


def reset_peaks(device: torch.device) -> bool:
    """Count peaks from now on; return whether `device` did so."""
    if not is_accelerator(device):
        return False
    reset = function_of(device, "reset_peak_memory_stats")
    try:
        if reset is not None:
            reset(device)
        elif memory_stats(device):
            torch.accelerator.reset_peak_memory_stats(indexed(device))
        else:
            return False
    except LACKING:
        return False
    return True


def empty_cache(device: torch.device) -> None:
    """Give memory that tensors no longer take back to the system, where the device caches any."""
    if not is_accelerator(device):
        return
    empty = function_of(device, "empty_cache")
    if empty is not None:
        empty()
    elif is_known_to_torch(device):
        answered(lambda _: torch.accelerator.empty_cache(), device)


def memory_stats(device: torch.device) -> Mapping[str, int]:
    """Return torch's own statistics of the device's allocator; empty where it has none."""
    if not is_known_to_torch(device):
        return {}
    return answered(torch.accelerator.memory_stats, device) or {}


def is_known_to_torch(device: torch.device) -> bool:
    """Whether `device` is of the kind that ``torch.accelerator`` speaks of."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def answered(function: Callable[[torch.device], Any], device: torch.device) -> Any:
    """Return what a function of ``torch.accelerator`` answers; None if the device lacks it."""
    try:
        return function(indexed(device))
    except LACKING:
        return None


def asked_without_device(device: torch.device, name: str) -> Any:
    """Return the answer of a function that takes no device, as those of ``torch.mps``."""
    function = function_of(device, name)
    if function is None:
        return None
    try:
        return function()
    except LACKING:
        return None


# --- random numbers


@tried_once
def has_generator(device: torch.device) -> bool:
    """Whether `device` has a generator of random numbers whose state can be saved and restored."""
    if not is_accelerator(device):
        return False  # a CPU's is torch's own
    try:
        state = function_named(device, "get_rng_state")(device)
        function_named(device, "set_rng_state")(state, device)
    except LACKING:
        return False
    return True


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's generator, uint8 on the host; None if it has none."""
    if not has_generator(device):
        return None
    return function_named(device, "get_rng_state")(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    function_named(device, "set_rng_state")(state, device)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator of this device alone, if it has one."""
    if not is_accelerator(device):
        return
    manual_seed = function_of(device, "manual_seed", "manual_seed_all")
    if manual_seed is not None:
        with current_device(device):
            manual_seed(seed)


def function_named(device: torch.device, name: str) -> Callable[..., Any]:
    """Return a function of the device's module; an AttributeError if there is none."""
    return getattr(device_module(device), name)
