"""How a network, an optimizer and random generators give their state, and take it back."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from common.checkpoints.pack import Tensors
from common.checkpoints.shards import fill, is_sharded, local
from common.devices import generator_state, has_generator, set_generator_state
from common.errors import UserError

# Options of an optimizer that choose its kernels.
KERNELS = ("fused", "foreach")
# Integers as wide as an element, to look at its bits.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Network:
    """A module: its parameters, of all ranks, and as its `state_dict` the rest, of each rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # By name of what was frozen from the start: the sum of its bits as written, None before.
        self.frozen: dict[str, int | None] = {
            name: None for name, value in module.named_parameters() if not value.requires_grad
        }

    def state_dict(self) -> dict[str, Any]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        state = self.module.state_dict()
        return {name: value for name, value in state.items() if name not in parameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError("other buffers")
        self.module.load_state_dict(state, strict=False)

    def take(self) -> tuple[Tensors, Tensors]:
        """Return the parameters that may have changed, and those that are still frozen.

        What changes without a gradient, as an average of weights does, is known by its bits.
        """
        parameters: Tensors = dict(self.module.named_parameters())
        still = {n: parameters[n] for n in self.frozen if not parameters[n].requires_grad}
        sums = sums_of_bits(still)
        self.frozen = {n: now for n, now in sums.items() if self.frozen[n] in (None, now)}
        frozen = {name: parameters.pop(name) for name in self.frozen}
        return parameters, frozen

    def put(self, path: Path, name: str, frozen: dict[str, Any], trained: dict[str, Any]) -> None:
        """Copy what the checkpoint at `path` has over the parameters."""
        parameters: Any = dict(self.module.named_parameters())
        saved = frozen | trained
        for key in sorted(parameters.keys() | saved.keys()):
            kinds = [(t[key].shape, t[key].dtype) for t in (parameters, saved) if key in t]
            if len(kinds) != 2 or kinds[0] != kinds[1]:
                raise UserError(f"{path} is of another model: its {name}.{key} does not fit")
        for key, parameter in parameters.items():
            fill(parameter, saved[key])
        still = self.frozen.keys() & frozen.keys() - trained.keys()
        self.frozen = dict(sums_of_bits({key: parameters[key] for key in still}))


def sums_of_bits(tensors: Tensors) -> dict[str, int]:
    """Return the sum of each tensor's bits, as integers that are as wide as its elements."""
    parts = [local(value.detach()) for value in tensors.values()]
    if not parts:
        return {}
    # No integers are as wide as complex128.
    plain = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    sums = torch.stack([part.view(BITS[part.element_size()]).sum() for part in plain])
    if any(map(is_sharded, tensors.values())):  # a tensor has changed on all ranks, or on none
        torch.distributed.all_reduce(sums)
    return dict(zip(tensors, sums.tolist(), strict=True))


class OptimizerState:
    """An optimizer's state, each tensor as exact and laid out as its parameter is."""

    def __init__(self, optimizer: Any) -> None:
        is_wrapped = isinstance(optimizer, AcceleratedOptimizer)
        self.optimizer = optimizer.optimizer if is_wrapped else optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, but leave the choice of kernels, which depends on the device.

        A run may go on with a device whose fused kernel can't be used, or the other way round.
        """
        groups = self.optimizer.param_groups
        saved_groups = [dict(group) for group in state["param_groups"]]
        for group, saved_group in zip(groups, saved_groups, strict=False):  # torch compares them
            saved_group |= {name: group[name] for name in KERNELS if name in group}
        self.optimizer.load_state_dict({**state, "param_groups": saved_groups})
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):  # as torch numbers them
            for name, value in state["state"].get(index, {}).items():
                # Fused kernels walk a parameter and its state side by side: same strides, then;
                # and `load_state_dict` gave it the parameter's type.
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape != ():
                    like = torch.empty_like(parameter, dtype=value.dtype)
                    fill(like, value)
                    self.optimizer.state[parameter][name] = like


class RandomState:
    """The random generators of this rank: torch's, NumPy's, Python's and the device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the states, that of the device under the name of its kind, such as "cuda"."""
        version, words, gauss = random.getstate()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        }
        device_state = generator_state(self.device)
        if device_state is not None:
            state[self.device.type] = device_state
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states; the device's only if they are from a device of the same kind."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        device_state = state.get(self.device.type)
        if device_state is not None and has_generator(self.device):
            set_generator_state(self.device, device_state)

    def load_from_ranks(self, states: list[dict[str, Any]]) -> None:
        """Leave the generators alone: other ranks than these draw from the seed."""
