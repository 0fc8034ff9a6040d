"""The capabilities of a device: torch is asked, or the capability is tried once.

A function about a device takes a `torch.device` and works for a CPU, a GPU of any vendor, and a
backend from outside of torch. If torch offers no query for a capability, a function tries it once
on a tiny tensor, and the result is remembered. If torch's module for the device (such as
``torch.mps``) lacks a function, the device lacks the capability.

Other packages import from here. The list shows which module has which function.
"""

from common.system.devices.compilation import can_launch_graphs, has_compiler
from common.system.devices.current import current_device, use
from common.system.devices.host_copies import has_pinned_memory, to_device
from common.system.devices.libraries import library_versions
from common.system.devices.memory import (
    MemoryInfo,
    allocated_bytes,
    empty_cache,
    has_own_memory_figures,
    keeps_peaks,
    memory_info,
    peak_bytes,
    reset_peaks,
)
from common.system.devices.names import device_name
from common.system.devices.optimizer_steps import (
    FusedOptimizer,
    has_loss_scaling,
    honours_scaling,
)
from common.system.devices.precision import has_autocast, has_float64, has_tf32
from common.system.devices.random_numbers import (
    generator_state,
    has_generator,
    seed_generator,
    set_generator_state,
)
from common.system.devices.selection import (
    USE_CPU_VARIABLE,
    default_device,
    indexed,
    is_accelerator,
    is_cpu_asked_for,
)
from common.system.devices.streams import (
    current_stream,
    has_streams,
    new_stream,
    on_stream,
    synchronize,
    synchronize_stream,
)
from common.system.devices.timing import has_timed_events, profiler_activity, recorded_event

__all__ = [
    "USE_CPU_VARIABLE",
    "FusedOptimizer",
    "MemoryInfo",
    "allocated_bytes",
    "can_launch_graphs",
    "current_device",
    "current_stream",
    "default_device",
    "device_name",
    "empty_cache",
    "generator_state",
    "has_autocast",
    "has_compiler",
    "has_float64",
    "has_generator",
    "has_loss_scaling",
    "has_own_memory_figures",
    "has_pinned_memory",
    "has_streams",
    "has_tf32",
    "has_timed_events",
    "honours_scaling",
    "indexed",
    "is_accelerator",
    "is_cpu_asked_for",
    "keeps_peaks",
    "library_versions",
    "memory_info",
    "new_stream",
    "on_stream",
    "peak_bytes",
    "profiler_activity",
    "recorded_event",
    "reset_peaks",
    "seed_generator",
    "set_generator_state",
    "synchronize",
    "synchronize_stream",
    "to_device",
    "use",
]
