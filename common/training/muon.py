"""Muon: gradient descent with momentum, in which the update of a matrix is made orthogonal."""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoints.shards import is_sharded
from common.training.optim import ParameterGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The quintic iteration of https://kellerjordan.github.io/posts/muon/, whose coefficients bring
# small singular values close to 1 in few steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

# Learning rates of groups, relative to that of the filters. That of biases was chosen by short runs
# of ResNet-18 on CIFAR-10 (docs/results.md); that of the last layer was not varied.
BIAS_RATE = 60.0
HEAD_RATE = 0.3

# Parameters of so many bytes are updated at once. That is enough to keep a GPU busy.
PART_BYTES = 8 * 2**20

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


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
            parameters = [p for p in group["params"] if p.grad is not None]
            for part in parts_of(parameters):
                self.update(part, group)

    def update(self, parameters: list[torch.Tensor], group: ParameterGroup) -> None:
        """Update some parameters of a group and their momenta, unless `found_inf` forbids it.

        Each line updates all of them at once. On a GPU, many small operations would take longer
        than the forward and the backward pass.

        Args:
            parameters: tensors of any shape, which have gradients; in an orthogonal group, of at
                least two dimensions. All are sharded by FSDP2, or none is.
            group: their settings; see `MuonGroup`.
        """
        gradients: Tensors = [p.grad for p in parameters if p.grad is not None]
        buffers = [self.momentum_buffer(parameter) for parameter in parameters]
        if self.grad_scale is not None:
            gradients = torch._foreach_div(gradients, self.grad_scale)
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        momenta: Tensors = torch._foreach_mul(buffers, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        # Nesterov's momentum looks one step ahead.
        directions: Tensors = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
        starts: Tensors = parameters
        if group["orthogonal"]:
            directions = orthogonal_directions(directions, group["newton_schulz_steps"])
            starts = with_fixed_norms(parameters)
        updated: Tensors = torch._foreach_add(starts, directions, alpha=-group["lr"])
        if self.found_inf is not None:
            is_finite = self.found_inf == 0
            momenta = chosen(is_finite, momenta, buffers)
            updated = chosen(is_finite, updated, parameters)
        copy_all(buffers, momenta)
        copy_all(parameters, updated)

    def momentum_buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the momentum of a parameter, which begins at zero."""
        state = self.state[parameter]
        # `__init__` makes no buffers, because `fully_shard` replaces the parameters afterwards.
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


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
        # As in airbench94. The other groups have the momentum that `Muon` is given.
        {"params": filters, "orthogonal": True, "momentum": 0.6},
        {"params": biases, "lr": BIAS_RATE * learning_rate},
        {"params": scales},
        {"params": others, "lr": HEAD_RATE * learning_rate, "weight_decay": weight_decay},
    ]


def parts_of(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield parameters in lists of up to `PART_BYTES`, or of one parameter that is larger.

    An update needs several times the memory of the parameters that it updates at once.
    """
    part: list[torch.Tensor] = []
    part_bytes = 0
    for parameter in parameters:
        if part and part_bytes + parameter.nbytes > PART_BYTES:
            yield part
            part = []
            part_bytes = 0
        part.append(parameter)
        part_bytes += parameter.nbytes
    if part:
        yield part


def copy_all(targets: Tensors, sources: Tensors) -> None:
    """Copy tensors into others."""
    if is_sharded(targets[0]):  # FSDP2's tensors have no foreach function for it
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


def chosen(condition: torch.Tensor, tensors: Tensors, others: Tensors) -> Tensors:
    """Return `tensors` if a condition on the device holds, and `others` if not."""
    pairs = zip(tensors, others, strict=True)
    return [torch.where(condition, tensor, other) for tensor, other in pairs]


def with_fixed_norms(filters: Tensors) -> Tensors:
    """Return each filter scaled to a fixed norm: the square root of its number of rows.

    A matrix whose rows have length 1 has this norm. Single rows may be longer or shorter.
    """
    roots = [math.sqrt(len(weights)) for weights in filters]
    norms = torch._foreach_norm(filters)
    # FSDP2's tensors have no foreach function for these quotients.
    factors = [root / norm for root, norm in zip(roots, norms, strict=True)]
    return torch._foreach_mul(filters, factors)


def orthogonal_directions(directions: Tensors, steps: int) -> list[torch.Tensor]:
    """Return approximately the orthogonal matrices nearest to directions, in the same shapes.

    Args:
        directions: of the updates of filters, each [channels out, ...], whole, or sharded by FSDP2.
            A direction counts as a matrix [channels out, the rest].
        steps: the number of iterations; see `orthogonalized`.

    Returns:
        Tensors of the same shapes and shardings.
    """
    if is_sharded(directions[0]):
        return [direction_of_shards(direction, steps) for direction in directions]
    filters = [in_order_of_memory(direction) for direction in directions]
    matrices = [filter.flatten(1) for filter in filters]
    # Matrices of the same shape are made orthogonal together, in few large operations.
    indices_by_group: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for index, matrix in enumerate(matrices):
        group = (matrix.shape, matrix.dtype, matrix.device)
        indices_by_group.setdefault(group, []).append(index)
    results = list(directions)
    for indices in indices_by_group.values():
        stacked = torch.stack([matrices[index] for index in indices])
        orthogonal_matrices = orthogonalized(stacked, steps)
        for index, matrix in zip(indices, orthogonal_matrices.unbind(), strict=True):
            orthogonal_filter = matrix.view(filters[index].shape)
            results[index] = in_order_of_dimensions(orthogonal_filter, directions[index])
    return results


def in_order_of_memory(filter: torch.Tensor) -> torch.Tensor:
    """Return a view of a channels-last filter with the channels last; any other filter as it is.

    Its rows are then a matrix without a copy. The order of a matrix's columns does not matter to
    the nearest orthogonal matrix, which has its columns in the same order.
    """
    return filter.permute(0, 2, 3, 1) if has_channels_last(filter) else filter


def in_order_of_dimensions(filter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `in_order_of_memory`.

    Args:
        like: the argument of `in_order_of_memory`.
    """
    return filter.permute(0, 3, 1, 2) if has_channels_last(like) else filter


def has_channels_last(filter: torch.Tensor) -> bool:
    return filter.ndim == 4 and filter.is_contiguous(memory_format=torch.channels_last)


def direction_of_shards(direction: torch.Tensor, steps: int) -> "DTensor":
    """Return the orthogonal direction for one that is sharded by FSDP2, sharded the same way."""
    assert is_sharded(direction)
    # Imported here, because the import takes a second.
    from torch.distributed.tensor import distribute_tensor

    # On a sharded matrix, each product below would be a collective. Every rank makes the whole
    # direction from a copy instead, and keeps its rows.
    whole = direction.full_tensor()
    (orthogonal,) = orthogonal_directions([whole], steps)
    mesh = direction.device_mesh
    return distribute_tensor(orthogonal, mesh, direction.placements, src_data_rank=None)


def orthogonalized(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return approximately the nearest matrices whose singular values are 1.

    They are found by the Newton-Schulz iteration.

    Args:
        matrices: [matrices, rows, columns].
        steps: the number of iterations. After three, singular values that were above about 0.75 %
            of a matrix's Frobenius norm lie between about 0.3 and 1.2. Smaller ones stay below.
    """
    a, b, c = NEWTON_SCHULZ
    _, rows, columns = matrices.shape
    is_tall = rows > columns
    # The products below are smaller if a matrix has no more rows than columns.
    results = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(results, dim=(1, 2), keepdim=True)
    results = results / (norms + 1e-7)  # no singular value is above 1
    for _ in range(steps):
        # An iteration maps each singular value s to a·s + b·s³ + c·s⁵.
        grams = torch.bmm(results, results.mT)
        factors = torch.baddbmm(grams, grams, grams, beta=b, alpha=c)
        results = torch.baddbmm(results, factors, results, beta=a)
    # With rows next to each other again, the result has the layout of the parameter.
    return results.mT.contiguous() if is_tall else results
