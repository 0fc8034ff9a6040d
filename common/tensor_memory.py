"""The bytes behind tensors: of a model, its gradients, its optimizer, what autograd saves."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, each counted once."""
    sizes = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        sizes[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(sizes.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes that all gradients will take, each in its parameter's type.

    DDP keeps them in buckets; unless they are views of those, there are two copies.
    """
    trained = [local(p) for p in model.parameters() if p.requires_grad]
    copies = 1
    if isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view:
        copies = 2
    return copies * sum(p.numel() * p.element_size() for p in trained)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes that an optimizer's state has after an update; None if that is not known.

    State that exists is counted. For the rest, a copy of the optimizer updates parameters of the
    same shapes on the meta device, which has no memory: one of each shape, and its state is
    counted for all. Optimizers that read their tensors' values, as Adafactor does, can't do that.
    """
    total = distinct_bytes(state_tensors(optimizer))
    for group in optimizer.param_groups:
        alike: dict[tuple[Any, ...], int] = defaultdict(int)
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                alike[tuple(local(parameter).shape), parameter.dtype] += 1
        if not alike:
            continue
        try:
            sizes = state_sizes(optimizer, group, list(alike))
        except Exception:  # an optimizer may refuse in any way, and a plan must not matter
            return None
        total += sum(size * count for size, count in zip(sizes, alike.values(), strict=True))
    return total


def state_sizes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], kinds: list[tuple[Any, ...]]
) -> list[int]:
    """Return the bytes of state that an update makes for a parameter of each (shape, type)."""
    parameters = []
    for shape, dtype in kinds:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        parameters.append(parameter)
    imagined = copy.copy(optimizer)
    imagined.state = defaultdict(dict)
    # Fused kernels are written for real devices; the state is the same without them.
    plain: dict[str, Any] = {name: False for name in ("fused", "foreach") if name in group}
    imagined.param_groups = [{**group, "params": parameters, **plain}]
    type(optimizer).step(imagined)
    return [
        sum(v.numel() * v.element_size() for v in imagined.state[p].values() if torch.is_tensor(v))
        for p in parameters
    ]


class SavedStorages:
    """Sums the distinct storages that autograd saves, those of the model's own tensors left out."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.known = {local(tensor).untyped_storage().data_ptr() for tensor in known}
        self.sizes: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's storage, and save the tensor itself."""
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        """The sum."""
        return sum(self.sizes.values())

    def start(self) -> None:
        """Look at each tensor saved from now on."""
        self.hooks.__enter__()

    def stop(self) -> None:
        """Look no longer."""
        self.hooks.__exit__(None, None, None)
