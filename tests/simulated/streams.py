"""Streams and events of the simulated device, and copies that arrive late.

All kernels run at once. A copy that the host does not wait for is late:

- To the device: it reads the host's memory when the next kernel of its stream runs, and may read
  it until somebody waits for the stream. Waiting raises `RaceError` if the host changed or freed
  that memory meanwhile. A kernel of another stream, which did not wait for the copy, sees `JUNK`.
- To the host: it writes when somebody waits for the stream. Until then the memory holds `JUNK`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any, Self

import torch

from tests.simulated.memory import on_host
from tests.simulated.pinned import is_pinned

JUNK = 77  # each byte of memory that a late copy has not reached yet
NUMBERS = itertools.count()  # of streams; the default one has 0
PRIVATE_USE = torch._C._autograd.DeviceType.PrivateUse1.value
WAITS: Counter[str] = Counter()  # how often the host waited for the device, by reason


class RaceError(RuntimeError):
    """The host changed or freed memory that the device was still to read."""


class Upload:
    """A late copy from the host to the device."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source = source.detach()
        self.storage = source.untyped_storage()
        self.target = on_host(target)
        self.values: torch.Tensor | None = None  # that the device has read
        self.is_done = False
        fill_with_junk(self.target)

    def run(self) -> None:
        """Read the host's memory, unless the copy has done so before."""
        if self.values is None:
            self.values = self.source.clone()
            self.target.copy_(self.values)

    def end(self) -> None:
        """Check that the host has neither changed nor freed its memory until now."""
        if self.is_done:
            return
        self.run()
        self.is_done = True
        assert self.values is not None
        # Two references are this copy's own: that of `source` and that of `storage`.
        is_freed = torch._C._storage_Use_Count(self.storage._cdata) <= 2
        if is_freed and not is_pinned(self.source):  # pinned memory waits for the copy
            raise RaceError("the host freed memory that the device may not have copied yet")
        if bytes_of(self.source) != bytes_of(self.values):
            raise RaceError("the host changed memory that the device may not have copied yet")


class Download:
    """A late copy from the device to the host."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.values = on_host(source).clone()  # as of now: later kernels come after the copy
        self.target = target.detach()
        self.is_done = False
        fill_with_junk(self.target)

    def run(self) -> None:
        """Do nothing: no kernel of the device reads the host's memory."""

    def end(self) -> None:
        """Let the copy arrive."""
        if not self.is_done:
            self.target.copy_(self.values)
            self.is_done = True


def fill_with_junk(tensor: torch.Tensor) -> None:
    """Fill a tensor of the host with junk, like memory that has never been written."""
    junk = torch.full((tensor.element_size(),), JUNK, dtype=torch.uint8)
    value = torch.tensor(True) if tensor.dtype == torch.bool else junk.view(tensor.dtype)[0]
    tensor.copy_(value)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor of the host as bytes, which equal themselves even if NaN."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


class Stream(torch.Stream):
    """A queue of the device's work, which holds the late copies that nobody has waited for."""

    copies: list[Upload | Download]

    def __new__(cls, device: Any = None, priority: int = 0) -> Self:
        # torch would give each stream of a device that is written in Python the number 0.
        stream = super().__new__(
            cls, stream_id=next(NUMBERS), device_index=0, device_type=PRIVATE_USE
        )
        stream.copies = []
        return stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """Take what `torch.Stream` takes."""

    def run(self) -> None:
        """Run the copies that come before a kernel of this stream."""
        for copy in self.copies:
            copy.run()

    def synchronize(self) -> None:
        """Let the host wait for all work of this stream."""
        WAITS["stream"] += 1
        self.finish()

    def finish(self) -> None:
        """End all work that this stream has received so far."""
        copies = self.copies
        self.copies = []
        for copy in copies:
            copy.end()

    def wait_stream(self, other: Any) -> None:
        """Let later work of this stream come after the current work of another."""
        self.copies = [*other.copies, *self.copies]

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream come after an event."""
        self.copies = [*event.copies, *self.copies]

    def record_event(self, event: Any = None) -> Event:
        """Return an event that comes after the current work."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done."""
        return all(copy.is_done for copy in self.copies)

    def __enter__(self) -> Self:
        entered_streams().append(self)
        return self

    def __exit__(self, *error: object) -> None:
        entered_streams().pop()


class Event(torch.Event):
    """A point in a stream's work."""

    copies: list[Upload | Download]
    seconds: float  # on the host's clock, when it was recorded

    def __new__(cls, device: Any = None, **options: Any) -> Self:
        event = super().__new__(cls, device="simulated:0")
        event.copies = []
        event.seconds = 0.0
        return event

    def __init__(self, device: Any = None, **options: Any) -> None:
        """Take what `torch.Event` takes."""

    def record(self, stream: Any = None) -> None:
        """Come after the current work of a stream."""
        self.copies = [*(stream or current_stream()).copies]
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds between two events."""
        return 1000 * (later.seconds - self.seconds)

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream come after this event."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the work before this event."""
        WAITS["event"] += 1
        for copy in self.copies:
            copy.end()

    def query(self) -> bool:
        """Whether the work before this event is done."""
        return all(copy.is_done for copy in self.copies)


class Entered(threading.local):
    """The streams that a thread has entered."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []


ENTERED = Entered()
STREAMS: list[Stream] = []  # the default one; the kernels' module adds those that copy


def entered_streams() -> list[Stream]:
    """Return the streams that this thread has entered, the current one last."""
    return ENTERED.streams


def default_stream() -> Stream:
    """Return the stream of all work outside of another stream."""
    if not STREAMS:
        STREAMS.append(Stream())
    return STREAMS[0]


def current_stream(device: Any = None) -> Stream:
    """Return the stream that receives this thread's work."""
    return ENTERED.streams[-1] if ENTERED.streams else default_stream()


def add(copy: Upload | Download) -> None:
    """Give a late copy to the current stream."""
    stream = current_stream()
    if stream not in STREAMS:
        STREAMS.append(stream)
    stream.copies.append(copy)


def synchronize(device: Any = None) -> None:
    """Let the host wait for all work of the device."""
    WAITS["device"] += 1
    for stream in [*STREAMS]:
        stream.finish()
