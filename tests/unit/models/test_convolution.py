"""Convolutions as matrix products: equal to torch's except for rounding."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from common.models.convolution import MAX_PIXELS, Convolution

Pair = tuple[int, int]
# Shapes of kernels, each with its padding.
KERNELS = [
    ((1, 1), (0, 0)),
    ((3, 3), (1, 1)),
    ((7, 7), (3, 3)),
    ((2, 3), (1, 0)),
]
SIZES = itertools.product(range(1, 4), repeat=2)  # of images, below and above MAX_PIXELS
STRIDES = [(1, 1), (2, 2), (1, 2)]


def fits(size: Pair, kernel: tuple[Pair, Pair]) -> bool:
    """Return whether a padded image is at least as large as the kernel."""
    shape, padding = kernel
    height_fits = size[0] + 2 * padding[0] >= shape[0]
    width_fits = size[1] + 2 * padding[1] >= shape[1]
    return height_fits and width_fits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [case for case in itertools.product(SIZES, KERNELS, STRIDES) if fits(case[0], case[1])],
)
def test_outputs_and_gradients_equal_conv2d(
    size: Pair, kernel: tuple[Pair, Pair], stride: Pair, bias: bool
) -> None:
    """The outputs have the same memory layout, too."""
    shape, padding = kernel
    torch.manual_seed(0)
    ours = Convolution(5, 4, shape, stride, padding, bias=bias, dtype=torch.float64)
    theirs = nn.Conv2d(5, 4, shape, stride, padding, bias=bias, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer in (theirs, ours, copy.deepcopy(ours).to(memory_format=torch.channels_last)):
        images = torch.ones(3, 5, *size, dtype=torch.float64).cumsum(0).cumsum(1).cumsum(3)
        images = images.to(memory_format=torch.channels_last).requires_grad_()
        outputs = layer(images)
        outputs.square().sum().backward()
        results.append([outputs, images.grad, *(p.grad for p in layer.parameters())])
        assert outputs.is_contiguous(memory_format=torch.channels_last)
    for expected, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, expected)


@pytest.mark.parametrize(("side", "expected"), [(2, "linear"), (3, "conv2d")])
def test_few_pixels_use_a_matrix_product(side: int, expected: str) -> None:
    """Larger images use a convolution."""
    assert (side**2 <= MAX_PIXELS) == (expected == "linear")
    with torch.profiler.profile() as profile:
        Convolution(2, 2, 3, padding=1)(torch.zeros(1, 2, side, side))
    names = {event.name for event in profile.events()}
    assert f"aten::{expected}" in names
    assert not {"aten::linear", "aten::conv2d"} - {f"aten::{expected}"} & names
