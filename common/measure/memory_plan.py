"""Plans the memory that training will need before it starts, and compares it with the real use."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.checkpoints.adapters import bare_optimizer
from common.checkpoints.shards import local
from common.console import say
from common.data.loader import Loader
from common.data.samples import Work
from common.measure.memory import MEBIBYTE, MemoryTracker, memory_now, peaks
from common.measure.memory_limits import device_memory
from common.measure.stopwatch import FIRST_UPDATES
from common.models.compile import is_compiled
from common.run_directory.records import MemoryPlanFacts
from common.system.devices import has_own_memory_figures

# The name of each part, and its planned and measured MiB, None if unknown.
MemoryRows = list[tuple[str, float | None, float | None]]
# The parts that are planned before the first update.
PLANNED_AT_START = ("weights", "gradients", "optimizer_state", "buffers", "checkpoint", "other")


class MemoryPlan:
    """The MiB that each part of training takes on this rank, planned and measured.

    Some parts are known before the first update:

    - ``weights``, ``gradients``, ``buffers`` and ``optimizer_state``, which stay in memory.
    - ``checkpoint``: the copies of the state that a checkpoint makes (on a GPU, if it has room).
    - ``other``: memory already in use. On a GPU these are data placed there; on a CPU, the program
      and its libraries.

    The first updates show the rest:

    - ``activations``: tensors that the forward pass keeps for the backward pass, including
      autocast's copies of weights.
    - ``workspace``: all further memory at the peak, such as that of kernels, their results, and
      libraries loaded during the first updates.

    Activations and workspace are planned for the longest batch, in proportion to its tokens.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Loader,
        when_measured: Callable[[float], None],
    ) -> None:
        """Plan the memory of a model, its gradients and its optimizer.

        Args:
            loader: the training loader, for the length of the longest batch.
            when_measured: is called once, after the first updates have been measured, with the
                share of the device's memory that the plan takes. On a CPU, the run then decides
                whether there is room to keep freed memory.
        """
        self.accelerator = accelerator
        self.device = accelerator.device
        self.model = model
        self.optimizer = bare_optimizer(optimizer)
        self.when_measured = when_measured
        self.most_tokens = most_tokens_of_batch(loader)
        # A compiled model would be compiled with the hooks that measure activations, and again
        # without them.
        self.measures_activations = not is_compiled(model)
        # The tokens of the longest micro-batch whose activations were measured; None: none was.
        self.measured_tokens: int | None = None
        self.first_updates = ExitStack()  # closes the tracker and the hook after the first updates
        self.updates = 0
        self.tracker: MemoryTracker | None = None  # measures the first updates
        self.measured: dict[str, float] = {}  # MiB by part
        self.planned = self.lasting_mib()  # MiB by part
        self.plan_parts_before_training()
        self.device_mib = device_memory(self.device) / MEBIBYTE

    def plan_parts_before_training(self) -> None:
        """Plan the gradients, other memory, the optimizer's full state, and the checkpoint.

        The full state replaces the optimizer's current state. If its size can't be found out, the
        plan leaves it out.
        """
        model = self.model
        # The memory in use, besides the model and the optimizer's current state.
        other = memory_now(self.device) / MEBIBYTE - sum(self.planned.values())
        gradients = mebibytes(p for p in model.parameters() if p.requires_grad)
        # DDP has already allocated the buckets for its gradients. On a GPU, `other` includes them,
        # so they are subtracted, because gradients are a part of their own. On a CPU, it does not
        # include them yet: pages are allocated when they are first touched.
        if isinstance(model, DistributedDataParallel) and has_own_memory_figures(self.device):
            other -= gradients
        self.planned |= {"gradients": gradients, "other": max(0.0, other)}
        state = optimizer_state_bytes(self.optimizer)
        if state is None:
            del self.planned["optimizer_state"]
        else:
            self.planned["optimizer_state"] = state / MEBIBYTE
        copied = ("weights", "buffers", "optimizer_state")
        self.planned["checkpoint"] = sum(self.planned.get(name, 0.0) for name in copied)

    def lasting_mib(self) -> dict[str, float]:
        """Return the MiB that weights, buffers and optimizer state take now.

        Gradients stay in memory as well, but `measure_gradients` measures them.
        """
        return {
            "weights": mebibytes(self.model.parameters()),
            "buffers": mebibytes(self.model.buffers()),
            "optimizer_state": mebibytes(state_tensors(self.optimizer)),
        }

    @property
    def total(self) -> float:
        """The planned MiB, as if all parts were in use at the same time."""
        return sum(self.planned.values())

    def facts(self) -> MemoryPlanFacts:
        """Return the entry of the plan in `config.json`."""
        sizes = {f"{name}_mib": size for name, size in self.planned.items()}
        return MemoryPlanFacts(total_mib=self.total, device_mib=self.device_mib, **sizes)

    @contextmanager
    def watching(self, work: Work) -> Iterator[None]:
        """Measure a micro-batch: the block is all that the loop does with it.

        Its activations are measured if it has more tokens than all micro-batches before. This goes
        on after the first updates, because `finish` compares the activations with the plan. The
        first call also starts to measure the peak memory of the first updates.
        """
        if self.tracker is None:
            self.tracker = self.first_updates.enter_context(MemoryTracker(self.device))
            hook = self.optimizer.register_step_pre_hook(self.measure_gradients)
            self.first_updates.callback(hook.remove)
        if self.measures_activations and self.is_longest(work):
            self.measured_tokens = work.tokens
            with saved_storages([*self.model.parameters(), *self.model.buffers()]) as sizes:
                yield
            self.measured["activations"] = sum(sizes.values()) / MEBIBYTE
        else:
            yield
        self.updates += self.accelerator.sync_gradients  # true at the end of an update
        if self.updates == FIRST_UPDATES:
            self.complete()

    def is_longest(self, work: Work) -> bool:
        """Whether a micro-batch has more tokens than all that were measured before."""
        return self.measured_tokens is None or work.tokens > self.measured_tokens

    def measure_gradients(self, *unused: object) -> None:
        """Measure the gradients; the optimizer calls this before each of the first updates.

        All gradients exist then. Afterwards the recipe frees them.
        """
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.measured["gradients"] = mebibytes(gradients)

    def complete(self) -> None:
        """Plan activations and workspace from the first updates, and print them.

        Then call `when_measured`. Without a micro-batch so far, or at a second call, do nothing.
        """
        if self.tracker is None or "workspace" in self.planned:
            return
        self.first_updates.close()
        new_parts = {}
        if "activations" in self.measured:
            new_parts["activations"] = self.measured["activations"]
        # All planned memory should be in use by now, except for the copies of a checkpoint.
        expected = self.total - self.planned.get("checkpoint", 0.0) + sum(new_parts.values())
        new_parts["workspace"] = max(0.0, self.tracker.peak_mib - expected)
        ratio = self.token_ratio()
        for name, size in new_parts.items():
            self.planned[name] = ratio * size
        parts = " + ".join(f"{name} {self.planned[name]:,.1f}" for name in new_parts)
        owner = self.device.type if has_own_memory_figures(self.device) else "host"
        share = f"{self.total / self.device_mib:.1%} of the {owner}'s memory"
        say(f"memory  {parts}: {self.total:,.1f} MiB in all, {share}")
        self.when_measured(self.total / self.device_mib)

    def token_ratio(self) -> float:
        """Return the tokens of the longest micro-batch, over those of the longest measured one.

        The result is at least 1. It is 1 if no activations were measured.
        """
        if self.measured_tokens is None:
            return 1.0
        # Samples that are not text have no tokens.
        return max(1.0, self.most_tokens / max(self.measured_tokens, 1))

    def finish(self) -> MemoryRows:
        """Return the planned and measured size of each part at the end of training."""
        self.complete()  # a short run has not reached `FIRST_UPDATES`
        planned = self.planned | {"total": self.total}
        measured = self.measured | self.lasting_mib()
        most_in_use = peaks(self.device).in_use
        measured["total"] = most_in_use / MEBIBYTE
        names = (*PLANNED_AT_START, "activations", "workspace", "total")
        return [(name, planned.get(name), measured.get(name)) for name in names]


def plan_text(facts: MemoryPlanFacts) -> str:
    """Return the planned sizes of the parts and their sum, on two lines."""
    parts = []
    for name in PLANNED_AT_START:
        size = getattr(facts, f"{name}_mib")
        size_text = "unknown" if size is None else f"{size:,.1f}"
        parts.append(f"{name.replace('_', ' ')} {size_text}")
    first_line = " + ".join(parts[:4])
    second_line = " + ".join(parts[4:])
    total = f"{facts.total_mib:,.1f} MiB of {facts.device_mib:,.0f}"
    return f"{first_line}\n        + {second_line} = {total}; activations: see the first updates"


def comparison_text(rows: MemoryRows) -> str:
    """Return the planned and measured MiB of the parts that were measured, on one line."""
    parts = []
    for name, planned, measured in rows:
        if measured:
            planned_text = "?" if planned is None else f"{planned:,.1f}"
            parts.append(f"{name.replace('_', ' ')} {planned_text} → {measured:,.1f}")
    return ", ".join(parts)


def most_tokens_of_batch(loader: Loader) -> int:
    """Return the tokens of a batch of the longest samples; 0 if samples have no lengths."""
    lengths = loader.order.lengths
    if lengths is None:
        return 0
    return int(np.sort(lengths)[-loader.order.batch_size :].sum())


def mebibytes(tensors: Iterable[torch.Tensor]) -> float:
    """Return the MiB of the storages behind tensors; a shared storage counts once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    bytes_by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(bytes_by_address.values()) / MEBIBYTE


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors in an optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value)]


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the size in bytes that an optimizer's state will have; None if it can't be found out.

    A copy of the optimizer makes an update on the meta device, where tensors have no values.
    """
    meta_copy = copy.copy(optimizer)
    meta_copy.state = defaultdict(dict)
    meta_copy.param_groups = []
    for group in optimizer.param_groups:
        trained = (p for p in group["params"] if p.requires_grad)
        parameters = [nn.Parameter(torch.empty_like(local(p), device="meta")) for p in trained]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        # Fused kernels need a real device; the state is the same without them.
        plain = dict.fromkeys(group.keys() & {"fused", "foreach"}, False)
        meta_copy.param_groups.append({**group, **plain, "params": parameters})
    try:
        # Do not call `meta_copy.step()`: a scheduler replaces the method `step` of an instance, and
        # the copied replacement would make a step of the real optimizer.
        type(optimizer).step(meta_copy)
    except Exception:  # an optimizer may raise anything, and a plan must not stop the run
        return None
    return sum(tensor.nbytes for tensor in state_tensors(meta_copy))


@contextmanager
def saved_storages(uncounted: Iterable[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Record the storages that autograd saves for the backward pass within the block.

    Args:
        uncounted: tensors, such as the weights, whose storages count as 0 bytes.

    Yields:
        The bytes of each storage, by its address: a dict that the block fills.
    """
    sizes = {local(tensor).untyped_storage().data_ptr(): 0 for tensor in uncounted}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        """Record the storage of a tensor that autograd saves; return what autograd is to save."""
        storage = tensor.untyped_storage()
        # FSDP gathers a layer's full weights for its forward pass and frees them afterwards, so
        # they are not activations. `sizes` has only the shards of these weights, so their class
        # tells them. A saved tensor may be a view of a weight.
        base = tensor if tensor._base is None else tensor._base
        is_weight = isinstance(base, nn.Parameter)
        sizes.setdefault(storage.data_ptr(), 0 if is_weight else storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes
