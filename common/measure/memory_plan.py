"""What training will need of the memory, known before it starts; and what it then took."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.console import say
from common.measure.memory import MEBIBYTE, device_memory, memory_now, peaks
from common.models.compile import is_compiled

# Of each part: its name, and the MiB planned and measured, where they are known.
MemoryRows = list[tuple[str, float | None, float | None]]
FIRST = ("weights", "gradients", "optimizer_state", "buffers")


class MemoryPlan:
    """The bytes that each part of training takes on this rank, planned and measured.

    Activations (what the forward pass keeps for the backward pass, autocast's copies of weights
    included) are measured in the first micro-batch. What else was in use when the plan was made
    is ``other``: data placed on a GPU; on a CPU the program and its libraries.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        self.accelerator: Any = accelerator
        self.device = accelerator.device
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self.measured: dict[str, int] = {}
        now = self.lasting()
        # DDP keeps gradients in buckets; unless they are views of those, there are two copies.
        is_ddp = isinstance(model, DistributedDataParallel)
        copies = 2 if is_ddp and not model.gradient_as_bucket_view else 1
        planned = now | {
            "gradients": copies * sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer_state": optimizer_state_bytes(self.optimizer),
            "other": max(0, memory_now(self.device) - sum(now.values())),
        }
        self.planned = {name: size for name, size in planned.items() if size is not None}
        self.device_bytes = device_memory(self.device)

    def lasting(self) -> dict[str, int]:
        return {
            "weights": distinct_bytes(self.model.parameters()),
            "buffers": distinct_bytes(self.model.buffers()),
            "optimizer_state": distinct_bytes(state_tensors(self.optimizer)),
        }

    @property
    def total(self) -> int:
        """In bytes: gradients and activations counted as there at once."""
        return sum(self.planned.values())

    def facts(self) -> dict[str, float]:
        """Return what is planned before the first update, in MiB, for `config.json`."""
        rows = self.planned | {"total": self.total, "device": self.device_bytes}
        return {f"{name}_mib": size / MEBIBYTE for name, size in rows.items()}

    def measure_first_step(self) -> None:
        """Watch the first micro-batch, until its backward pass has ended.

        On CUDA by the allocator; on a CPU by the storages that are saved for the backward pass,
        but of a compiled model: it would be compiled with the hooks, and again without them.
        """
        if "gradients" in self.measured:
            return
        backward, on_cpu = self.accelerator.backward, self.device.type == "cpu"
        before, watching = memory_now(self.device), ExitStack()
        saved = SavedStorages([*self.model.parameters(), *self.model.buffers()])
        if on_cpu and not is_compiled(self.model):
            watching.enter_context(saved)

        def measured_backward(loss: torch.Tensor, **others: Any) -> None:
            del self.accelerator.backward  # the instance's: the method comes back
            watching.close()
            if on_cpu and is_compiled(self.model):
                say("memory  activations: not measured of a compiled model on a CPU")
            else:
                added = memory_now(self.device) - before
                taken = sum(saved.sizes.values()) if on_cpu else added
                self.measured["activations"] = self.planned["activations"] = taken
                say(
                    f"memory  activations {taken / MEBIBYTE:,.1f} MiB: "
                    f"{self.total / MEBIBYTE:,.1f} MiB in all, {self.total / self.device_bytes:.1%}"
                    f" of the {'host' if on_cpu else 'device'}'s memory"
                )
            backward(loss, **others)
            gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
            self.measured["gradients"] = distinct_bytes(gradients)

        self.accelerator.backward = measured_backward

    def finish(self) -> MemoryRows:
        """Return what was planned and what was measured, after at least one update."""
        planned = self.planned | {"total": self.total}
        measured = self.measured | self.lasting() | {"total": peaks(self.device)[0]}
        both = [{n: size / MEBIBYTE for n, size in part.items()} for part in (planned, measured)]
        names = (*FIRST, "activations", "other", "total")
        return [(name, both[0].get(name), both[1].get(name)) for name in names]


def plan_text(facts: Mapping[str, float]) -> str:
    """Return a line of what `MemoryPlan.facts` says before training."""
    sizes = [(name.replace("_", " "), facts.get(f"{name}_mib")) for name in (*FIRST, "other")]
    parts = [f"{name} {'unknown' if size is None else f'{size:,.1f}'}" for name, size in sizes]
    return (
        f"{' + '.join(parts)} = {facts['total_mib']:,.1f} MiB of {facts['device_mib']:,.0f}; "
        "activations: see the first update"
    )


def comparison_text(rows: MemoryRows) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {'?' if planned is None else f'{planned:,.1f}'}"
        f" → {measured:,.1f}"
        for name, planned, measured in rows
        if measured
    )


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr() or id(s): s.nbytes() for s in storages}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value)]


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of an optimizer's state after an update; None if that is not known.

    State that exists is counted. For the rest, a copy of the optimizer updates parameters of the
    same shapes on the meta device. Optimizers that read values, as Adafactor does, can't do that.
    """
    imagined = copy.copy(optimizer)
    imagined.state, imagined.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        missing = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        parameters = [nn.Parameter(torch.empty_like(p, device="meta")) for p in missing]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        # Fused kernels are written for real devices; the state is the same without them.
        plain = dict.fromkeys(group.keys() & {"fused", "foreach"}, False)
        imagined.param_groups += [{**group, **plain, "params": parameters}] if parameters else []
    try:
        type(optimizer).step(imagined)
    except Exception:  # an optimizer may refuse in any way, and a plan must not matter
        return None
    made = sum(tensor.nbytes for tensor in state_tensors(imagined))
    return distinct_bytes(state_tensors(optimizer)) + made


class SavedStorages(torch.autograd.graph.saved_tensors_hooks):
    """While entered, sums the distinct storages that autograd saves, but those of `known`."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__(self.note, lambda tensor: tensor)
        self.sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in known}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor
