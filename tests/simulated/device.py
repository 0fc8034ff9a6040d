"""The simulated device as torch sees it: registration, the module ``torch.simulated``, variants."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.simulated import autocast, kernels, memory, pinned, streams

MEMORY = 2**30  # bytes that a device with memory figures reports


@dataclass(frozen=True)
class Variant:
    """The features in which real devices differ. A word of `parse` can set each field."""

    fused: str = "ignored"  # grad_scale and found_inf by fused optimizers: honoured, ignored, none
    streams: bool = True
    memory_figures: bool = False
    float64: bool = False
    pinned_memory: bool = False
    name: str = "Simulated accelerator"

    @classmethod
    def parse(cls, words: str) -> Variant:
        """Read words such as "fused=none,no-streams,memory-figures"."""
        fields: dict[str, Any] = {}
        for word in filter(None, words.split(",")):
            name, _, value = word.partition("=")
            is_lacking = name.startswith("no-")
            field = name.removeprefix("no-").replace("-", "_")
            fields[field] = value or not is_lacking
        return cls(**fields)


def install(variant: Variant) -> ModuleType:
    """Register the device in this process, once, and return its module."""
    if variant.float64:
        memory.LACKING.clear()
    module = module_of(variant)
    _setup_privateuseone_for_python_backend(kernels.DEVICE, backend_module=module)
    kernels.register(variant.fused)
    autocast.register()
    install_in_accelerator(variant)
    keep_freed_storage()
    if variant.pinned_memory:
        pinned.install()
    return module


def module_of(variant: Variant) -> ModuleType:
    """Return the module ``torch.simulated``, which corresponds to ``torch.cuda``."""
    module: Any = ModuleType("torch.simulated")
    generator = kernels.GENERATOR.generator
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    # Each process of a launch has one device, which it sees as the first.
    module.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: nullcontext()
    module.get_device_name = lambda device=None: variant.name
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed = generator.manual_seed
    module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.synchronize = streams.synchronize
    module.empty_cache = lambda: None
    if variant.streams:
        module.Stream = streams.Stream
        module.Event = streams.Event
        module.current_stream = streams.current_stream
        module.stream = lambda stream: stream
    if variant.memory_figures:
        counts = memory.ALLOCATED
        counts.is_counted = True
        module.mem_get_info = lambda device=None: (MEMORY - counts.size, MEMORY)
        module.memory_allocated = lambda device=None: counts.size
        module.max_memory_allocated = lambda device=None: counts.peak
        module.max_memory_reserved = lambda device=None: counts.peak
        module.reset_peak_memory_stats = lambda device=None: counts.reset_peak()
    return module


def keep_freed_storage() -> None:
    """Let storages of the device keep their memory when FSDP2 frees it.

    FSDP2 allocates the memory again later, but torch can neither shrink nor grow the storages of a
    device that is written in Python.
    """
    storage_type: Any = torch.UntypedStorage
    resize = storage_type.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != kernels.DEVICE:
            return resize(storage, size)
        if size > storage.nbytes():
            raise NotImplementedError("a storage of the simulated device can't grow")
        return storage

    storage_type.resize_ = resize_


def install_in_accelerator(variant: Variant) -> None:
    """Add the parts of ``torch.accelerator`` that a backend written in Python does not provide."""
    library: Any = torch._C
    library._accelerator_synchronizeDevice = streams.synchronize
    if not variant.streams:
        return
    library._accelerator_getStream = streams.current_stream
    replaced: Any = torch
    replaced.Stream = streams.Stream
    replaced.Event = streams.Event
