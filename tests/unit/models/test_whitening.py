"""Whitening filters: what they make of the patches of images."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from common.models.whitening import whitening_filters


@pytest.mark.parametrize(("channels", "kernel_size"), [(1, 2), (3, 2), (3, 3)])
def test_outputs_are_uncorrelated_with_variance_one(channels: int, kernel_size: int) -> None:
    """Neighbouring pixels and channels are alike in images, and the filters undo that."""
    noise = torch.randn(200, channels, 10, 10, generator=torch.Generator().manual_seed(0))
    images = F.avg_pool2d(noise, 2, stride=1) + 0.5 * noise[:, :1, 1:, 1:]
    filters = whitening_filters(images, kernel_size)
    patch_size = channels * kernel_size**2
    assert filters.shape == (2 * patch_size, channels, kernel_size, kernel_size)
    assert torch.equal(filters[:patch_size], -filters[patch_size:])
    outputs = F.conv2d(images, filters[:patch_size]).transpose(0, 1).flatten(1)
    covariance = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(covariance, torch.eye(patch_size), atol=0.05, rtol=0)


def test_directions_without_variance_are_not_blown_up() -> None:
    """Images of one colour have no variance in most directions."""
    images = torch.randn(50, 1, 1, 1).expand(50, 3, 6, 6)
    filters = whitening_filters(images, 2)
    assert filters.isfinite().all()
    assert filters.abs().max() < 50
