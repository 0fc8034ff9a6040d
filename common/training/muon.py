"""Muon: gradient descent with momentum, in which the update of a matrix is made orthogonal."""

import math
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoints.shards import is_sharded
from common.training.optim import ParameterGroup

# The quintic iteration of https://kellerjordan.github.io/posts/muon/, whose coefficients bring
# small singular values close to 1 in few steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MuonGroup(TypedDict, total=False):
    """A group of parameters that share their settings; missing settings have the defaults."""

    params: Iterable[torch.Tensor]
    lr: float
    momentum: float
    weight_decay: float
    orthogonal: bool
    newton_schulz_steps: int


class Muon(Optimizer):
    """Nesterov's momentum, with orthogonal updates for groups that have `orthogonal=True`.

    The parameters of these groups are matrices or filters.

    A filter [channels out, ...] counts as a matrix [channels out, the rest]. Its update is close to
    the orthogonal matrix that is nearest to its momentum. Before each update, the filter is scaled
    to the norm of a matrix whose rows have length 1, so it must stand before a batch norm, which
    ignores the scale. Parameters of other groups are updated as by `torch.optim.SGD`.

    `torch.optim.Muon` can't take the place of this class: it takes matrices only, so filters and
    parameters without orthogonal updates would need other optimizers.
    """

    # The step obeys the two attributes below: if `found_inf` is 1, it changes nothing. It does so
    # without waiting for the device.
    _step_supports_amp_scaling = True
    # `GradScaler` sets both attributes for a step, and deletes them afterwards.
    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[MuonGroup],
        lr: float,
        momentum: float = 0.6,
        weight_decay: float = 0.0,
        newton_schulz_steps: int = 3,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "orthogonal": False,
            "newton_schulz_steps": newton_schulz_steps,
        }
        super().__init__([dict(group) for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup
    ) -> None:
        """Update one parameter and its momentum, unless `found_inf` forbids it.

        Args:
            parameter: a tensor of any shape; in an orthogonal group, of at least two dimensions.
            gradient: a tensor of the same shape.
            group: the settings of the parameter's group; see `MuonGroup`.
        """
        state = self.state[parameter]
        # `__init__` makes no buffers, because `fully_shard` replaces the parameters afterwards.
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum_buffer"]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        momentum = buffer.mul(group["momentum"]).add_(gradient)
        # Nesterov's momentum looks one step ahead.
        direction = gradient.add(momentum, alpha=group["momentum"])
        start = parameter
        if group["orthogonal"]:
            direction = orthogonal_direction(direction, group["newton_schulz_steps"])
            # A matrix whose rows have length 1 has the norm √rows.
            start = parameter * (math.sqrt(len(parameter)) / parameter.norm())
        updated = start.add(direction, alpha=-group["lr"])
        if self.found_inf is not None:
            is_finite = self.found_inf == 0
            momentum = torch.where(is_finite, momentum, buffer)
            updated = torch.where(is_finite, updated, parameter)
        buffer.copy_(momentum)
        parameter.copy_(updated)


def muon_groups(model: nn.Module, learning_rate: float, weight_decay: float) -> list[MuonGroup]:
    """Return the trainable parameters of a network with batch norms, in groups for Muon.

    The biases of batch norms learn faster than the rest (arXiv 2404.00498, section 3.4). The last
    layer learns more slowly, because its updates have no fixed size, unlike those of filters.

    Args:
        model: each of its filters stands before a batch norm.
        learning_rate: of the filters and of the scales of batch norms.
        weight_decay: of all other weights, such as the last layer's. It would not change filters,
            whose scale is fixed.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    bias_ids = {id(norm.bias) for norm in norms}
    scale_ids = {id(norm.weight) for norm in norms}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    filters = [p for p in trained if p.ndim == 4]
    biases = [p for p in trained if id(p) in bias_ids]
    scales = [p for p in trained if id(p) in scale_ids]
    others = [p for p in trained if p.ndim != 4 and id(p) not in bias_ids | scale_ids]
    return [
        {"params": filters, "orthogonal": True, "momentum": 0.6},
        {"params": biases, "lr": 60 * learning_rate},
        {"params": scales},
        {"params": others, "lr": 0.3 * learning_rate, "weight_decay": weight_decay},
    ]


def orthogonal_direction(direction: torch.Tensor, steps: int) -> torch.Tensor:
    """Return approximately the orthogonal matrix nearest to a direction, in the direction's shape.

    Args:
        direction: the direction of a filter's update, [channels out, ...], whole, or sharded by
            FSDP2. It counts as a matrix [channels out, the rest].
        steps: the number of iterations; see `orthogonalized`.

    Returns:
        A tensor of the same shape and sharding.
    """
    if not is_sharded(direction):
        return orthogonalized(direction.flatten(1), steps).view_as(direction)
    # Imported here, because the import takes a second.
    from torch.distributed.tensor import distribute_tensor

    # On a sharded matrix, each product below would be a collective. Every rank makes the whole
    # direction from a copy instead, and keeps its rows.
    whole = direction.full_tensor()
    orthogonal = orthogonalized(whole.flatten(1), steps).reshape(whole.shape)
    mesh = direction.device_mesh
    return distribute_tensor(orthogonal, mesh, direction.placements, src_data_rank=None)


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return approximately the nearest matrix whose singular values are 1.

    It is found by the Newton-Schulz iteration.

    Args:
        matrix: [rows, columns].
        steps: the number of iterations. After three, singular values that were above about 0.75 %
            of the matrix's Frobenius norm lie between about 0.3 and 1.2. Smaller ones stay below.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    # The products below are smaller if a matrix has no more rows than columns.
    result = matrix.T if is_tall else matrix
    result = result / (result.norm() + 1e-7)  # no singular value is above 1
    for _ in range(steps):
        # An iteration maps each singular value s to a·s + b·s³ + c·s⁵.
        gram = result @ result.T
        result = a * result + (b * gram + c * (gram @ gram)) @ result
    return result.T if is_tall else result
