"""Muon: orthogonal updates of filters, SGD's for the rest, and updates that are skipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.training import muon
from common.training.muon import Muon, orthogonalized


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_singular_values_come_close_to_one(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    """A matrix keeps its directions, and its scale does not matter."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    matrix = (u @ torch.diag(values.clamp(min=values.max() / 20)) @ v).float() * scale
    (result,) = orthogonalized(matrix[None], steps=5)
    assert result.shape == matrix.shape
    projected = u.T @ result.double() @ v.T
    off_diagonal = projected - torch.diag(projected.diag())
    assert off_diagonal.abs().max() < 1e-3
    assert 0.5 < projected.diag().min() <= projected.diag().max() < 1.3


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_other_groups_are_updated_as_by_sgd(momentum: float, weight_decay: float) -> None:
    """Biases and matrices that are not to be orthogonal follow Nesterov's momentum."""
    ours = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(4, 3))]
    theirs = copy.deepcopy(ours)
    optimizer = Muon([{"params": ours}], lr=0.1, momentum=momentum, weight_decay=weight_decay)
    sgd = torch.optim.SGD(
        theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0
    )
    for _ in range(4):
        for weight, expected in zip(ours, theirs, strict=True):
            weight.grad = torch.randn_like(weight)
            expected.grad = weight.grad.clone()
        optimizer.step()
        sgd.step()
    for weight, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, expected)


def test_direction_is_that_of_torch() -> None:
    """For matrices whose rows have length 1, an update is that of `torch.optim.Muon`."""
    torch.manual_seed(0)  # other draws may round differently, beyond the tolerance below
    rows = 6
    columns = 10  # torch scales the rate of taller matrices
    weight = torch.randn(rows, columns)
    weight *= math.sqrt(rows) / weight.norm()
    ours = torch.nn.Parameter(weight.clone())
    theirs = torch.nn.Parameter(weight.clone())
    groups = [{"params": [ours], "orthogonal": True}]
    optimizer = Muon(groups, lr=0.01, momentum=0.9, newton_schulz_steps=5)
    torchs = torch.optim.Muon([theirs], lr=0.01, momentum=0.9, weight_decay=0.0)
    for _ in range(2):
        before = ours.detach().clone()
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        theirs.data.copy_(before * (math.sqrt(rows) / before.norm()))
        optimizer.step()
        torchs.step()
        # Torch computes the direction in bf16.
        torch.testing.assert_close(ours, theirs, atol=0.01 * 0.03, rtol=0)


def test_scale_of_a_filter_does_not_matter() -> None:
    """A filter before a batch norm may have any norm, and has the same one after each update."""
    weight = torch.randn(8, 4, 3, 3)
    gradient = torch.randn_like(weight)
    updated = []
    for scale in (1.0, 100.0):
        parameter = torch.nn.Parameter(weight * scale)
        parameter.grad = gradient
        Muon([{"params": [parameter], "orthogonal": True}], lr=0.1).step()
        updated.append(parameter.detach())
    torch.testing.assert_close(updated[0], updated[1])


@pytest.mark.parametrize("orthogonal", [True, False])
def test_update_that_is_not_finite_changes_nothing(orthogonal: bool) -> None:
    """The mark of the gradient guard skips it: weights and momentum keep their bits."""
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = Muon([{"params": [parameter], "orthogonal": orthogonal}], lr=0.1)
    parameter.grad = torch.randn(3, 4)
    optimizer.step()
    before = parameter.detach().clone()
    momentum = optimizer.state[parameter]["momentum_buffer"].clone()
    parameter.grad = torch.full((3, 4), math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum)
    optimizer.found_inf = torch.zeros(())
    parameter.grad = torch.randn(3, 4)
    optimizer.step()
    assert not torch.equal(parameter, before)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_scaled_gradients_give_the_same_update(orthogonal: bool) -> None:
    """With a loss scale, as in fp16, gradients are divided by it; powers of two change no bit."""
    weights = [torch.randn(3, 4), torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)]
    gradients = [torch.randn_like(weight) for weight in weights]
    updated = []
    for scale in (1.0, 1024.0):
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        optimizer = Muon([{"params": parameters, "orthogonal": orthogonal}], lr=0.1)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * scale
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
        updated.append([*(parameter.detach() for parameter in parameters), *momenta])
    for tensor, expected in zip(*updated, strict=True):
        assert torch.equal(tensor, expected)


def test_groups_are_updated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is in one part, in order, and no part of several takes too much memory."""
    monkeypatch.setattr(muon, "PART_BYTES", 100)
    sizes = [10, 10, 5, 30, 1, 24, 1]  # of 4 bytes each
    parameters = [torch.zeros(size) for size in sizes]
    parts = list(muon.parts_of(parameters))
    assert [len(parameter) for part in parts for parameter in part] == sizes
    assert [[len(parameter) for parameter in part] for part in parts] == [
        [10, 10, 5],
        [30],
        [1, 24],
        [1],
    ]


@pytest.mark.parametrize("shapes", [[(8, 4, 3, 3)] * 3, [(8, 4, 3, 3), (4, 8), (8, 2, 3, 1)]])
def test_filters_do_not_depend_on_each_other_or_on_their_layout(
    shapes: list[tuple[int, ...]],
) -> None:
    """Filters of one shape are updated together, and give what each gives alone."""
    weights = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]

    def update(numbers: Sequence[int], layout: torch.memory_format) -> list[torch.Tensor]:
        parameters = []
        for number in numbers:
            is_filter = weights[number].ndim == 4
            kept = layout if is_filter else torch.contiguous_format
            parameter = torch.nn.Parameter(weights[number].clone(memory_format=kept))
            parameter.grad = gradients[number].clone(memory_format=kept)
            parameters.append(parameter)
        Muon([{"params": parameters, "orthogonal": True}], lr=0.1).step()
        return [parameter.detach() for parameter in parameters]

    together = update(range(len(shapes)), torch.channels_last)
    for number, parameter in enumerate(together):
        for layout in (torch.channels_last, torch.contiguous_format):
            (alone,) = update([number], layout)
            torch.testing.assert_close(parameter, alone)


def test_goes_on_from_its_state() -> None:
    """An optimizer that is loaded makes the same updates, bit for bit."""
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    first = Muon([{"params": [parameter], "orthogonal": True}], lr=0.1)
    parameter.grad = torch.randn(3, 4)
    first.step()
    other = torch.nn.Parameter(parameter.detach().clone())
    second = Muon([{"params": [other], "orthogonal": True}], lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    parameter.grad = torch.randn(3, 4)
    other.grad = parameter.grad.clone()
    first.step()
    second.step()
    assert torch.equal(parameter, other)
