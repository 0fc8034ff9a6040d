"""What training will need of the memory, known before it starts; and what it then took."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.checkpoints.shards import local
from common.console import say
from common.data.batch import Work
from common.data.loader import Loader
from common.devices import has_own_memory_figures
from common.measure.memory import MEBIBYTE, MemoryTracker, device_memory, memory_now, peaks
from common.measure.stopwatch import FIRST_UPDATES
from common.models.compile import is_compiled
from common.records import MemoryPlanFacts

# Of each part: its name, and the MiB planned and measured, where they are known.
MemoryRows = list[tuple[str, float | None, float | None]]
KNOWN = ("weights", "gradients", "optimizer_state", "buffers", "checkpoint", "other")


class MemoryPlan:
    """The MiB that each part of training takes on this rank, planned and measured.

    Before the first update, what lasts is known, with the copies that a ``checkpoint`` makes (on a
    GPU where there is room for them), and ``other``, which is in use already: data placed on a GPU;
    on a CPU the program and its libraries. The first updates show the rest: ``activations``, which
    the forward pass keeps for the backward pass (autocast's copies of weights included), and
    ``workspace``, which is taken besides at the peak: by kernels, their results, and libraries that
    were not in use before. Both are planned for the longest batch, in proportion to its tokens.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Loader):
        self.accelerator, self.device, self.model = accelerator, accelerator.device, model
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        size, lengths = loader.order.batch_size, loader.order.lengths
        self.most_tokens = 0 if lengths is None else int(np.sort(lengths)[-size:].sum())
        # Of the longest micro-batch so far. A compiled model's activations are not looked at: it
        # would be compiled with the hooks, and again without them.
        self.watched_tokens = math.inf if is_compiled(model) else -1
        self.first_updates, self.updates = ExitStack(), 0
        self.tracker: MemoryTracker | None = None  # of the first updates
        self.measured: dict[str, float] = {}
        self.planned = self.lasting()
        used = memory_now(self.device) / MEBIBYTE - sum(self.planned.values())
        gradients = mebibytes(p for p in model.parameters() if p.requires_grad)
        # On a GPU the buckets exist, in which DDP's gradients will lie; on a CPU, as pages that
        # nobody has touched.
        if isinstance(model, DistributedDataParallel) and has_own_memory_figures(self.device):
            used -= gradients
        self.planned |= {"gradients": gradients, "other": max(0.0, used)}
        state = optimizer_state_bytes(self.optimizer)
        if state is None:
            del self.planned["optimizer_state"]
        else:
            self.planned["optimizer_state"] = state / MEBIBYTE
        copied = ("weights", "buffers", "optimizer_state")
        self.planned["checkpoint"] = sum(self.planned.get(name, 0.0) for name in copied)
        self.device_mib = device_memory(self.device) / MEBIBYTE

    def lasting(self) -> dict[str, float]:
        return {
            "weights": mebibytes(self.model.parameters()),
            "buffers": mebibytes(self.model.buffers()),
            "optimizer_state": mebibytes(state_tensors(self.optimizer)),
        }

    @property
    def total(self) -> float:
        """All parts counted as there at once."""
        return sum(self.planned.values())

    def facts(self) -> MemoryPlanFacts:
        """Return the entry of the plan in `config.json`."""
        sizes = {f"{name}_mib": size for name, size in self.planned.items()}
        return MemoryPlanFacts(total_mib=self.total, device_mib=self.device_mib, **sizes)

    @contextmanager
    def watching(self, work: Work) -> Iterator[None]:
        """Look at what a micro-batch takes, if it is longer than all before."""
        if self.tracker is None:
            self.tracker = self.first_updates.enter_context(MemoryTracker(self.device))
            hook = self.optimizer.register_step_pre_hook(self.see_gradients)
            self.first_updates.callback(hook.remove)
        if work.tokens > self.watched_tokens:
            self.watched_tokens = work.tokens
            with saved_storages([*self.model.parameters(), *self.model.buffers()]) as sizes:
                yield
            self.measured["activations"] = sum(sizes.values()) / MEBIBYTE
        else:
            yield
        self.updates += self.accelerator.sync_gradients
        if self.updates == FIRST_UPDATES:
            self.complete()

    def see_gradients(self, *unused: object) -> None:
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.measured["gradients"] = mebibytes(gradients)

    def complete(self) -> None:
        if self.tracker is None or "workspace" in self.planned:
            return
        self.first_updates.close()
        seen = {name: size for name, size in self.measured.items() if name == "activations"}
        expected = self.total - self.planned.get("checkpoint", 0.0) + sum(seen.values())
        seen["workspace"] = max(0.0, self.tracker.peak_mib - expected)
        ratio = max(1.0, self.most_tokens / max(self.watched_tokens, 1))
        self.planned |= {name: ratio * size for name, size in seen.items()}
        parts = " + ".join(f"{name} {self.planned[name]:,.1f}" for name in seen)
        owner = self.device.type if has_own_memory_figures(self.device) else "host"
        share = f"{self.total / self.device_mib:.1%} of the {owner}'s memory"
        say(f"memory  {parts}: {self.total:,.1f} MiB in all, {share}")

    def finish(self) -> MemoryRows:
        self.complete()
        planned = self.planned | {"total": self.total}
        measured = self.measured | self.lasting()
        measured["total"] = peaks(self.device)[0] / MEBIBYTE
        names = (*KNOWN, "activations", "workspace", "total")
        return [(name, planned.get(name), measured.get(name)) for name in names]


def plan_text(facts: MemoryPlanFacts) -> str:
    """Return the planned sizes of the parts and their sum, on two lines."""
    parts = []
    for name in KNOWN:
        size = getattr(facts, f"{name}_mib")
        size_text = "unknown" if size is None else f"{size:,.1f}"
        parts.append(f"{name.replace('_', ' ')} {size_text}")
    first_line = " + ".join(parts[:4])
    second_line = " + ".join(parts[4:])
    total = f"{facts.total_mib:,.1f} MiB of {facts.device_mib:,.0f}"
    return f"{first_line}\n        + {second_line} = {total}; activations: see the first updates"


def comparison_text(rows: MemoryRows) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {'?' if planned is None else f'{planned:,.1f}'}"
        f" → {measured:,.1f}"
        for name, planned, measured in rows
        if measured
    )


def mebibytes(tensors: Iterable[torch.Tensor]) -> float:
    """Return the size of the storages behind `tensors`, each counted once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) / MEBIBYTE


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value)]


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return an optimizer's state in bytes, by an update on the meta device; None if it can't."""
    imagined = copy.copy(optimizer)
    imagined.state, imagined.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        trained = (p for p in group["params"] if p.requires_grad)
        parameters = [nn.Parameter(torch.empty_like(local(p), device="meta")) for p in trained]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        # Fused kernels are written for real devices; the state is the same without them.
        plain = dict.fromkeys(group.keys() & {"fused", "foreach"}, False)
        imagined.param_groups.append({**group, **plain, "params": parameters})
    try:
        type(optimizer).step(imagined)
    except Exception:  # an optimizer may refuse in any way, and a plan must not matter
        return None
    return sum(tensor.nbytes for tensor in state_tensors(imagined))


@contextmanager
def saved_storages(known: Iterable[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Give the bytes of each storage that autograd saves meanwhile, 0 of those that are `known`."""
    sizes = {local(tensor).untyped_storage().data_ptr(): 0 for tensor in known}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # FSDP frees the whole weights of a layer after its forward pass.
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        sizes.setdefault(storage.data_ptr(), 0 if is_weight else storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes
