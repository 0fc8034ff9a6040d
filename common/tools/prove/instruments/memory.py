"""Measures memory at every fifth update: of the process, of its allocator, and of live tensors.

It writes `MemoryInUse`. The allocator's figure is exact to the byte, where the system's C library
reports it. Resident memory includes what the allocator keeps for later. After the last update, it
writes `GrowingTensors` for each kind of tensor of which there are ever more.
"""

import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from common.run import Run
from common.system.devices import allocated_bytes
from common.tools.prove.instruments.holders import holder_of
from common.tools.prove.notes import GrowingTensors, MemoryInUse
from common.tools.prove.session import Session

MEASURED_EVERY = 5  # updates; a log line must come with each, because sums are folded there
FIRST = 10  # updates in which libraries fill their caches
Kind = tuple[str, tuple[int, ...]]  # dtype and shape


def install(session: Session) -> None:
    meter = MemoryObserver(session)
    session.wrap(Run, "record", meter.recording)


class MemoryObserver:
    """Writes what is in use after some updates."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.process = psutil.Process()
        self.first_kinds: Counter[Kind] | None = None  # of the tensors, at the first measurement
        self.first_step = 0

    def recording(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Measure after a micro-batch that ended an update."""
        step = run.progress.global_step
        original(run, *positional, **named)
        del positional, named  # they hold tensors of this micro-batch
        now = run.progress.global_step
        if now > step and now % MEASURED_EVERY == 0 and now >= FIRST:
            self.measure(run, now)

    def measure(self, run: Run, step: int) -> None:
        """Note the memory in use; at the last measurement, also which tensors have become more."""
        gc.collect()
        tensors = live_tensors()
        kinds = Counter(kind_of(tensor) for tensor in tensors)
        self.session.write(
            MemoryInUse(
                step=step,
                resident=self.process.memory_info().rss,
                in_use=bytes_in_use(),
                device=allocated_bytes(run.device),
                tensors=len(tensors),
                tensor_bytes=bytes_of(tensors),
            )
        )
        if self.first_kinds is None:
            self.first_kinds = kinds
            self.first_step = step
        elif step + MEASURED_EVERY > run.plan.total_steps:
            folder = Path(run.context.recipe_file).resolve().parent
            self.note_growing(kinds, tensors, step, folder)

    def note_growing(
        self, kinds: Counter[Kind], tensors: list[torch.Tensor], step: int, folder: Path
    ) -> None:
        """Note each kind of tensor that has become more by one in two updates or faster."""
        assert self.first_kinds is not None
        least = max(2, (step - self.first_step) // 2)
        for kind, count in kinds.items():
            more = count - self.first_kinds[kind]
            if more < least:
                continue
            examples = [tensor for tensor in tensors if kind_of(tensor) == kind]
            dtype, shape = kind
            self.session.write(
                GrowingTensors(
                    step=step,
                    dtype=dtype,
                    shape=[*shape],
                    count=count,
                    more=more,
                    holder=holder_of(examples, sys._getframe(), folder),
                )
            )


def live_tensors() -> list[torch.Tensor]:
    """Return all tensors that Python holds."""
    # The class is compared by type: `isinstance` would run code of objects that pretend a class.
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]


def kind_of(tensor: torch.Tensor) -> Kind:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the tensors' memory; several views of one memory count once."""
    sizes = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.layout == torch.strided and local.device.type != "meta":
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class AllocatorFigures(ctypes.Structure):
    """The figures that glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def allocator_function() -> Any:
    """Return `mallinfo2` of the C library; None if it has none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = AllocatorFigures
    return function


def bytes_in_use() -> int | None:
    """Return the bytes that the C library's allocator has given out; None if it does not tell."""
    function = allocator_function()
    if function is None:
        return None
    figures = function()
    return int(figures.uordblks) + int(figures.hblkhd)
