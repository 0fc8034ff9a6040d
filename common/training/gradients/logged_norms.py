"""The gradient norms that a run logs: of all gradients, and by `--log-gradients` of each layer."""

import math
from collections import defaultdict
from typing import TYPE_CHECKING, cast

import torch
from accelerate import Accelerator
from torch import nn

from common.checkpoints.shards import is_sharded

if TYPE_CHECKING:  # the import takes a second
    from torch.distributed.tensor import DTensor


class LoggedNorms:
    """The norms of the last update, before clipping, of the network that was clipped first."""

    def __init__(self, accelerator: Accelerator, by_layer: bool) -> None:
        """Begin with a norm of 0.

        Args:
            by_layer: whether to compute the gradient norm of each layer as well. This reads all
                gradients once more.
        """
        self.accelerator = accelerator
        self.by_layer = by_layer
        self.grad_norm = torch.zeros((), device=accelerator.device)  # of all gradients
        # The norm of each gradient, by parameter name; only with `by_layer`.
        self.parameter_norms: dict[str, torch.Tensor] = {}

    def remember(self, model: nn.Module, gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Keep the norms of an update, without waiting for the device.

        Args:
            gradients: those of the network's parameters that have one, in their order.
            norm: the norm of all gradients.
        """
        self.grad_norm = norm
        if self.by_layer:
            parameters = self.accelerator.unwrap_model(model).named_parameters()
            names = [name for name, parameter in parameters if parameter.grad is not None]
            norms = torch._foreach_norm(gradients)
            self.parameter_norms = dict(zip(names, norms, strict=True))

    def layer_figures(self) -> dict[str, float]:
        """Return the ``gradients/`` metrics: the norm of each layer over all of its parameters.

        The result is empty without `by_layer`. This must be called on all ranks, because the norms
        of sharded gradients are combined in collectives.
        """
        norms = [norm_over_ranks(norm) for norm in self.parameter_norms.values()]
        values = torch.stack(norms).tolist() if norms else []
        sums_of_squares = defaultdict[str, float](float)
        for name, norm in zip(self.parameter_norms, values, strict=True):
            layer = name.rpartition(".")[0]
            sums_of_squares[f"gradients/{layer}"] += norm**2
        return {metric: math.sqrt(total) for metric, total in sums_of_squares.items()}


def norm_over_ranks(norm: torch.Tensor) -> torch.Tensor:
    """Combine the ranks' norms of a sharded gradient in a collective; return others as they are."""
    return cast("DTensor", norm).full_tensor() if is_sharded(norm) else norm
