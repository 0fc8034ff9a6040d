"""A pretended GPU: torch's CUDA functions and NVML's, replaced by ones that work on the CPU.

The replacements have the original signatures. A copy on a stream other than that of training
happens only when something waits for that stream. If the code under test forgets to wait, the
values are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pynvml
import pytest
import torch
from accelerate.utils import recursively_apply
from accelerate.utils import send_to_device as really_send

from common.system import devices
from common.system.devices import trials

NVML = (
    "nvmlInit",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetSamples",
    "nvmlDeviceGetUtilizationRates",
)
# The originals, before a test replaces them.
EMPTY_LIKE = torch.empty_like
COPY = torch.Tensor.copy_
STREAM = torch.cuda.Stream
EVENT = torch.cuda.Event


def partialmethod_of(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which becomes a method of the class whose attribute it is."""
    return lambda tensor, *arguments, **keywords: stand_in(tensor, *arguments, **keywords)


class Cuda:
    """The pretended GPU: records events in order, and delays the work of its streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        # Memory, in bytes.
        self.free = 10 * 2**30
        self.total = 16 * 2**30
        self.allocated = 2**30
        self.random = torch.arange(16, dtype=torch.uint8)
        self.streams: list[Any] = []
        self.active: list[Any] = []  # the innermost `with torch.cuda.stream(...)` is the last
        self.replace = monkeypatch.setattr
        self.training = self.stream()
        properties = SimpleNamespace(uuid="1234", total_memory=self.total)
        answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: self.current,
            "mem_get_info": lambda device="cuda": (self.free, self.total),
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.allocated,
            "max_memory_reserved": lambda device=None: 2 * self.allocated,
            "reset_peak_memory_stats": lambda device=None: None,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: "Stand-in",
            "get_rng_state": lambda device="cuda": self.random.clone(),
            "set_rng_state": lambda new_state, device="cuda": COPY(self.random, new_state),
            "stream": self.on_stream,
        }
        for name, answer in answers.items():
            real = getattr(torch.cuda, name)
            self.replace(torch.cuda, name, create_autospec(real, side_effect=answer))
        for spec, make in ((STREAM, self.new_stream), (EVENT, self.new_event)):
            self.replace(torch.cuda, spec.__name__, create_autospec(spec, side_effect=make))
        self.replace(devices, "new_stream", self.new_stream)
        self.replace(devices, "on_stream", self.on_stream)
        self.answer_trials(monkeypatch)
        self.replace_accelerator_functions()
        for method in (self.record_stream, self.copy_, self.pin_memory):
            self.replace(torch.Tensor, method.__name__, partialmethod_of(method))
        self.replace(torch, "empty_like", self.empty_like)

    def replace_accelerator_functions(self) -> None:
        """Let `torch.accelerator` name the GPU."""
        self.replace(torch.accelerator, "is_available", lambda: True)
        self.replace(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        self.replace(torch.accelerator, "current_device_index", lambda: 0)
        self.replace(torch.accelerator, "current_stream", lambda device=None: self.current)

    def answer_trials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer the questions for which `common.system.devices` would try a tensor on the GPU."""
        tried = ("has_float64", "has_generator", "has_pinned_memory", "has_streams")
        for name in tried:
            for device in (torch.device("cuda"), torch.device("cuda", 0)):
                monkeypatch.setitem(trials.ANSWERS, (name, device), True)

    @property
    def current(self) -> Any:
        """The current stream."""
        return self.active[-1] if self.active else self.training

    def stream(self) -> Any:
        """Return a new stream, whose methods have the signatures of torch's."""
        stream = create_autospec(STREAM, instance=True)
        stream.late = []  # work that waits until something waits for the stream
        stream.wait_stream.side_effect = lambda other: self.run(other)
        stream.wait_event.side_effect = lambda event: self.run(event.of)
        stream.record_event.side_effect = lambda event=None: self.new_event(of=stream)
        stream.synchronize.side_effect = lambda: self.run(stream)
        self.streams.append(stream)
        return stream

    def new_stream(self, device: Any = None, priority: int = 0) -> Any:
        """Stand for `torch.cuda.Stream(...)`."""
        assert torch.device(device).type == "cuda"
        return self.stream()

    def new_event(self, of: Any = None, **options: Any) -> Any:
        """Stand for `torch.cuda.Event(...)`, and for the events that a stream records."""
        event = create_autospec(EVENT, instance=True)
        event.of = of  # the stream that it was recorded on
        event.record.side_effect = lambda stream=None: setattr(event, "of", stream or self.current)
        event.synchronize.side_effect = lambda: self.run(event.of)
        event.wait.side_effect = lambda stream=None: self.run(event.of)
        return event

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Stand for `with torch.cuda.stream(...)`."""
        self.active.append(stream)
        try:
            yield
        finally:
            self.active.pop()

    def run(self, stream: Any) -> None:
        """Do the delayed work of a stream, now that something waits for it."""
        self.events.append(("waited", self.streams.index(stream)))
        delayed = stream.late
        stream.late = []
        for work in delayed:
            work()

    def later(self, work: Callable[[], Any]) -> None:
        """Do work at once on the training stream; on others, once something waits for them."""
        if self.current is self.training:
            work()
        else:
            self.current.late.append(work)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Stand for `Tensor.record_stream`."""
        self.events.append(("recorded", self.streams.index(stream)))

    def copy_(self, target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        """Stand for `Tensor.copy_`, which without blocking happens later."""
        if non_blocking:
            self.later(lambda: COPY(target, source))
            return target
        return COPY(target, source)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stand for `Tensor.pin_memory`."""
        self.events.append(("pinned", tuple(tensor.shape)))
        return tensor

    def empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """Stand for `torch.empty_like`; pinned memory is filled with 77, as if used before."""
        if options.pop("pin_memory", False):
            self.events.append(("pinned", tuple(tensor.shape)))
            options["device"] = "cpu"
            return COPY(EMPTY_LIKE(tensor, **options), torch.full_like(tensor, 77))
        return EMPTY_LIKE(tensor, **options)

    def send(self, module: ModuleType) -> None:
        """Replace a module's `send_to_device` by one that copies on the current stream."""

        def send(batch: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
            assert device.type == "cuda"
            assert non_blocking

            def sent(tensor: torch.Tensor) -> torch.Tensor:
                on_device = torch.zeros_like(tensor)
                self.later(lambda: COPY(on_device, tensor))
                return on_device

            return recursively_apply(sent, batch)

        replaced: Mock = create_autospec(really_send, side_effect=send)
        self.replace(module, "send_to_device", replaced)


class Nvml:
    """A driver whose answers a test sets, in NVML's units and with pynvml's signatures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.millijoules = 1000
        self.latest = 90  # percent: the current utilisation
        self.samples: list[tuple[int, int]] = []  # microseconds, percent
        self.is_broken = False
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self.millijoules,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=self.latest),
            "nvmlDeviceGetSamples": self.late_samples,
        }
        driver = create_autospec(pynvml)
        for name, answer in answers.items():
            getattr(driver, name).side_effect = self.unless_broken(answer)
        monkeypatch.setitem(sys.modules, "pynvml", driver)

    def unless_broken(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that answers, or raises NVML's error once the driver is broken."""

        def call(*arguments: Any) -> Any:
            if self.is_broken:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return answer(*arguments)

        return call

    def late_samples(self, device: str, sampling_type: int, since: int) -> Any:
        """Stand for `nvmlDeviceGetSamples`."""
        assert device == "GPU-1234"
        assert sampling_type == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        late = [sample for sample in self.samples if sample[0] > since]
        if not late:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 1, [
            SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=percent))
            for at, percent in late
        ]
