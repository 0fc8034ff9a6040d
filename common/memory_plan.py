"""What training will need of the memory, known before it starts; and what it then took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.compilation import is_compiled
from common.console import say
from common.memory import MEBIBYTE, device_memory, memory_now, peak_memory_bytes
from common.tensor_memory import (
    SavedStorages,
    distinct_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    state_tensors,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

# Of each part: its name, and the MiB planned and measured, where they are known.
MemoryRows = list[tuple[str, float | None, float | None]]
ROWS = ("weights", "gradients", "optimizer_state", "buffers", "activations", "other", "total")


class MemoryPlan:
    """The bytes that each part of training takes on this rank, planned and measured.

    Weights, gradients, optimizer state and buffers are known before the first update.
    Activations (what the forward pass keeps for the backward pass, autocast's copies of weights
    included) are measured in the first micro-batch, and never again. What else was in use when
    the plan was made is ``other``: data placed on a GPU; on a CPU the program and its libraries.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        """Plan for a prepared model and the optimizer that Accelerate wraps."""
        self.accelerator, self.device = accelerator, accelerator.device
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self.measured: dict[str, int] = {}
        already = distinct_bytes(state_tensors(self.optimizer))
        weights = distinct_bytes(model.parameters())
        buffers = distinct_bytes(model.buffers())
        state = optimizer_state_bytes(self.optimizer)
        self.planned = {
            "weights": weights,
            "gradients": gradient_bytes(model),
            **({} if state is None else {"optimizer_state": state}),
            "buffers": buffers,
            "other": max(0, memory_now(self.device) - weights - buffers - already),
        }
        self.device_bytes = device_memory(self.device)

    @property
    def total(self) -> int:
        """All of the plan, in bytes: gradients and activations counted as there at once."""
        return sum(self.planned.values())

    def facts(self) -> dict[str, float]:
        """Return what is planned before the first update, in MiB, for `config.json`."""
        rows = self.planned | {"total": self.total, "device": self.device_bytes}
        return {f"{name}_mib": size / MEBIBYTE for name, size in rows.items()}

    def measure_first_step(self) -> None:
        """Watch the first micro-batch, from now until its backward pass has ended.

        On CUDA by the allocator; on a CPU by the distinct storages that are saved for the
        backward pass, which adds a call for each saved tensor of that one micro-batch. Not of a
        compiled model on a CPU: those calls would be compiled, and all of it again without them.
        """
        if "gradients" in self.measured:
            return
        accelerator: Any = self.accelerator
        backward: Callable[..., None] = accelerator.backward
        before = memory_now(self.device)
        saved = SavedStorages([*self.model.parameters(), *self.model.buffers()])
        on_cpu = self.device.type == "cpu"
        is_hooked = on_cpu and not is_compiled(self.model)
        if is_hooked:
            saved.start()

        def measured_backward(loss: torch.Tensor, **others: Any) -> None:
            del accelerator.backward  # the instance's: the method comes back
            if is_hooked:
                saved.stop()
            if is_hooked or not on_cpu:
                taken = saved.bytes if on_cpu else memory_now(self.device) - before
                self.measured["activations"] = self.planned["activations"] = taken
                say(f"memory  activations {mebibytes(taken)}: {self.sentence()}")
            else:
                say("memory  activations: not measured of a compiled model on a CPU")
            backward(loss, **others)
            gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
            self.measured["gradients"] = distinct_bytes(gradients)

        accelerator.backward = measured_backward

    def sentence(self) -> str:
        """Return the total against the device's memory."""
        share = self.total / self.device_bytes
        kind = "the host's memory" if self.device.type == "cpu" else "the device's memory"
        return f"{mebibytes(self.total)} in all, {share:.1%} of {kind}"

    def finish(self) -> MemoryRows:
        """Return what was planned and what was measured, after at least one update."""
        self.measured |= {
            "weights": distinct_bytes(self.model.parameters()),
            "buffers": distinct_bytes(self.model.buffers()),
            "optimizer_state": distinct_bytes(state_tensors(self.optimizer)),
            "total": peak_memory_bytes(self.device),
        }
        planned, measured = self.planned | {"total": self.total}, self.measured

        def size(column: Mapping[str, int], name: str) -> float | None:
            return column[name] / MEBIBYTE if name in column else None

        return [(name, size(planned, name), size(measured, name)) for name in ROWS]


def mebibytes(size: float) -> str:
    """Return a size in bytes as text."""
    return f"{size / MEBIBYTE:,.1f} MiB"


def plan_text(facts: Mapping[str, float]) -> str:
    """Return the line that shows a plan before training; `facts` as of `MemoryPlan.facts`."""
    names = ("weights", "gradients", "optimizer_state", "buffers", "other")
    sizes = {name: facts.get(f"{name}_mib") for name in names}
    parts = [
        f"{name.replace('_', ' ')} " + ("unknown" if size is None else f"{size:,.1f}")
        for name, size in sizes.items()
    ]
    return (
        f"{' + '.join(parts)} = {facts['total_mib']:,.1f} MiB of {facts['device_mib']:,.0f}; "
        "activations: see the first update"
    )


def comparison_text(rows: MemoryRows) -> str:
    """Return the line that sets what was measured beside the plan."""

    def shown(size: float | None) -> str:
        return "?" if size is None else f"{size:,.1f}"

    return ", ".join(
        f"{name.replace('_', ' ')} {shown(planned)} → {shown(measured)}"
        for name, planned, measured in rows
        if measured
    )
