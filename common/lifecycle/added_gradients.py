"""Notices a backward pass that adds to the gradients of an update that has already been made."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from common.checkpoints.shards import local


class AddedGradients:
    """Watches the first backward pass after an update that has left gradients.

    A loop may remove them after the update, or before the next backward pass. So they are looked at
    when the backward pass reaches their parameter. FSDP2 does not compute gradients of the sharded
    parameters themselves, so there is nothing to notice.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, RemovableHandle] = {}  # by the name of the parameter
        self.names: list[str] = []  # parameters to whose gradients the backward pass has added

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch the parameters of this mapping whose gradients are left.

        A parameter that is frozen now gets no gradient in the next backward pass.
        """
        for name, parameter in parameters.items():
            if parameter.requires_grad and has_gradient(parameter):
                hook: Callable[[torch.Tensor], None] = partial(self.note, name, parameter)
                self.hooks[name] = parameter.register_hook(hook)

    def note(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Note a gradient that torch is about to add to the one of its parameter."""
        if has_gradient(parameter):
            self.names.append(name)
        # Further micro-batches of an update rightly add to its gradients.
        self.hooks.pop(name).remove()

    def end(self) -> list[str]:
        """Stop watching; return the names of the parameters whose gradients were added up."""
        for hook in self.hooks.values():
            hook.remove()
        self.hooks.clear()
        return self.names


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether a parameter has a gradient that is not 0.

    `zero_grad(set_to_none=False)` keeps gradients of 0, to which nothing is added.
    """
    return parameter.grad is not None and bool(local(parameter.grad).any())
