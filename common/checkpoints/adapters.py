"""Adapters that save and restore modules, gradients, optimizers and random generators.

`common.checkpoints.state` saves the result of an adapter's `state_dict`. A resume passes it to
`load_state_dict`.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from common.checkpoints.checksums import sums_of_bits
from common.checkpoints.pack import Tensors
from common.checkpoints.shards import Rows, fill
from common.errors import MisfitError, UserError
from common.system.devices import generator_state, has_generator, set_generator_state

# A part's state: tensors and plain values, nested in dicts and lists. torch gives the state of a
# module or an optimizer this type. Only the part itself knows the type of a value.
State = dict[str, Any]
Part = TypeVar("Part")
# The action if a checkpoint does not fit the model or optimizer.
MODEL_ADVICE = "resume with the code and flags that wrote the checkpoint, or start a new run"
# The options of an optimizer that choose its kernels.
KERNELS = ("fused", "foreach")


def bare_optimizer(part: Part) -> Part:
    """Return the optimizer inside a wrapper, such as Accelerate's, which has it as `optimizer`.

    A wrapper has another class, and lacks attributes of fused optimizers. An object without the
    attribute `optimizer` is returned itself, so this may be called with any part.
    """
    return getattr(part, "optimizer", part)


class Network:
    """A module, as a part of a checkpoint.

    Its parameters are the same on all ranks; `split_parameters` returns them, and
    `load_parameters` restores them. Its `state_dict` has the rest, such as batch norm's statistics,
    which differ between ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # A checksum of each parameter that has been frozen since the start, by name. It is the sum
        # of the parameter's bits when `split_parameters` or `load_parameters` last saw it, and None
        # before that. Another checksum later shows that the parameter has changed.
        self.frozen_checksums: dict[str, int | None] = {
            name: None for name, value in module.named_parameters() if not value.requires_grad
        }

    def state_dict(self) -> State:
        """Return the entries of the module's state that are not parameters."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        state = self.module.state_dict()
        return {name: value for name, value in state.items() if name not in parameters}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`; a `MisfitError` if this module has other buffers."""
        if state.keys() != self.state_dict().keys():
            raise MisfitError("it has other buffers")
        # Not strict: `state` lacks the parameters, which `load_parameters` restores.
        self.module.load_state_dict(state, strict=False)

    def split_parameters(self) -> tuple[Tensors, Tensors]:
        """Return the parameters that may have changed, and those that are still frozen.

        Frozen parameters go into a lasting file, which is written once and shared by many
        checkpoints. A parameter can change without a gradient, as averaged weights do. Its checksum
        shows such a change. This function then removes the parameter from `frozen_checksums`, to
        which it never returns.

        If the module is sharded, all ranks must call this function.
        """
        parameters: Tensors = dict(self.module.named_parameters())
        candidates = {}
        for name in self.frozen_checksums:
            if not parameters[name].requires_grad:
                candidates[name] = parameters[name]
        still_frozen: dict[str, int | None] = {}
        for name, bits in sums_of_bits(candidates).items():
            if self.frozen_checksums[name] in (None, bits):  # None: this is the first time
                still_frozen[name] = bits
        self.frozen_checksums = still_frozen
        frozen_parameters = {name: parameters.pop(name) for name in self.frozen_checksums}
        return parameters, frozen_parameters

    def load_parameters(
        self,
        path: Path,
        name: str,
        frozen: Mapping[str, torch.Tensor | Rows],
        trained: Mapping[str, torch.Tensor | Rows],
    ) -> None:
        """Restore the parameters from a checkpoint.

        Args:
            path: the checkpoint, for a message.
            name: the part's name, for a message.
            frozen: the parameters in the lasting file, which several checkpoints share, by name.
            trained: the other parameters. A parameter in both was unfrozen later, and this is its
                newer value.

        Raises:
            UserError: a parameter is missing, unknown, or of another shape or dtype.
        """
        parameters: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        saved = {**frozen, **trained}
        for key in sorted(parameters.keys() | saved.keys()):
            if shape_and_dtype(parameters, key) != shape_and_dtype(saved, key):
                raise UserError(
                    f"{path} was written by another model, because {name}.{key} "
                    f"{tensor_in_words(saved, key)} in the checkpoint, but "
                    f"{tensor_in_words(parameters, key)} in this run",
                    advice=MODEL_ADVICE,
                )
        for key, parameter in parameters.items():
            fill(parameter, saved[key])
        # Later checkpoints leave out the parameters that are still frozen. These were frozen when
        # this process began, and the checkpoint has them only in the lasting file.
        still_frozen: Tensors = {}
        # The order is the same on all ranks, as `sums_of_bits` needs it.
        for key in self.frozen_checksums:
            if key in frozen and key not in trained:
                still_frozen[key] = parameters[key]
        self.frozen_checksums = dict(sums_of_bits(still_frozen))


def tensor_in_words(tensors: Mapping[str, torch.Tensor | Rows], name: str) -> str:
    """Return words for a message: such as "is [2, 3] float32", or "does not exist"."""
    tensor = tensors.get(name)
    if tensor is None:
        return "does not exist"
    return f"is {[*tensor.shape]} {str(tensor.dtype).removeprefix('torch.')}"


def shape_and_dtype(
    tensors: Mapping[str, torch.Tensor | Rows], name: str
) -> tuple[torch.Size, torch.dtype] | None:
    """Return the shape and dtype of a named tensor, to compare; None if there is no such tensor."""
    tensor = tensors.get(name)
    return None if tensor is None else (tensor.shape, tensor.dtype)


class LeftGradients:
    """The gradients that an update has left in networks, as a part of a checkpoint.

    Most loops remove all gradients after each step, so the state is empty. A loop may also make a
    step with one of its optimizers in every second update only. The update in between leaves the
    gradients of this optimizer's parameters, and the next one adds to them.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        """Keep the networks, by their names in the checkpoint."""
        self.parameters: dict[str, nn.Parameter] = {}
        for network_name, network in networks.items():
            for name, parameter in network.named_parameters():
                self.parameters[f"{network_name}.{name}"] = parameter

    def state_dict(self) -> Tensors:
        """Return the gradients by the names of their parameters."""
        gradients: Tensors = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        return gradients

    def load_state_dict(self, state: Tensors) -> None:
        """Give each parameter its saved gradient, in the memory layout of the parameter."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name in state:
                saved = state[name]
                parameter.grad = torch.empty_like(parameter, dtype=saved.dtype)
                fill(parameter.grad, saved)


class OptimizerState:
    """An optimizer, as a part of a checkpoint.

    Its tensors get back their exact values, in the memory layout of their parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # A wrapper that is not Accelerate's may have a state of its own, so it is saved as it is.
        is_wrapped = isinstance(optimizer, AcceleratedOptimizer)
        self.optimizer: torch.optim.Optimizer = (
            bare_optimizer(optimizer) if is_wrapped else optimizer
        )

    def state_dict(self) -> State:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restore the state, but keep this optimizer's choice of kernels.

        That choice depends on the device. A run may continue on another type of device, and not
        every device has a fused kernel that can be used.
        """
        saved_groups = []
        for group in state["param_groups"]:
            saved_groups.append(dict(group))
        # Not strict: the optimizer's own `load_state_dict` refuses another number of groups.
        for group, saved_group in zip(self.optimizer.param_groups, saved_groups, strict=False):
            for name in KERNELS:
                if name in group:
                    saved_group[name] = group[name]
        self.optimizer.load_state_dict({**state, "param_groups": saved_groups})
        self.lay_out_as_parameters(state["state"])

    def lay_out_as_parameters(self, saved_states: Mapping[int, Mapping[str, object]]) -> None:
        """Replace the restored tensors by copies with the strides of their parameters.

        Fused kernels read a parameter and its state side by side, so both need the same strides.
        `load_state_dict` gave the tensors the dtype of the parameter, so the copies are made from
        the saved tensors, in the saved dtype.

        A tensor that lacks the shape of its parameter, such as a step counter, is not replaced. Nor
        is any tensor of a parameter without dimensions, which has no strides.

        Args:
            saved_states: the saved states by the parameter's index, counted through all groups.
        """
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, value in saved_states.get(index, {}).items():
                if not isinstance(value, torch.Tensor) or parameter.ndim == 0:
                    continue
                if value.shape == parameter.shape:
                    like_parameter = torch.empty_like(parameter, dtype=value.dtype)
                    fill(like_parameter, value)
                    self.optimizer.state[parameter][name] = like_parameter


class RandomState:
    """The random generators of this rank: torch's, NumPy's, Python's and the device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state_dict(self) -> State:
        """Return the states by generator; the device's is under its type, such as "cuda"."""
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

    def load_state_dict(self, state: State) -> None:
        """Restore the states; the device's only if it was saved on a device of the same type."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        device_state = state.get(self.device.type)
        if device_state is not None and has_generator(self.device):
            set_generator_state(self.device, device_state)

    def load_from_ranks(self, states: list[State]) -> None:
        """Keep the generators as they were seeded.

        With another number of ranks, no rank can continue what the saved generators began.
        """


class GeneratorState:
    """A generator of the recipe, as a part of a checkpoint."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> State:
        return {"device": self.generator.device.type, "state": self.generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        """Restore the state if it was saved on a device of the same type."""
        if state["device"] == self.generator.device.type:
            self.generator.set_state(state["state"])

    def load_from_ranks(self, states: list[State]) -> None:
        """Restore the state if it was the same on all ranks; if not, keep the generator as seeded.

        With another number of ranks, no rank can continue what different generators began.
        """
        first = states[0]["state"]
        if all(torch.equal(first, state["state"]) for state in states):
            self.load_state_dict(states[0])
