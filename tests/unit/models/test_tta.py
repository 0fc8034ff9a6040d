"""Test-time augmentation: which views of an image a model sees, and how they count."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from common.models.tta import Views


class Recorder(nn.Module):
    """Remembers the images that it saw, and returns all of their pixels, squared."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(images)
        return images.flatten(1) ** 2


def expected_views(images: torch.Tensor) -> list[torch.Tensor]:
    """Return the images themselves, and then both shifts by a pixel along the diagonal."""
    size = images.shape[2]
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    starts = (1, 0, 2)
    return [torch.from_numpy(padded[:, :, n : n + size, n : n + size]) for n in starts]


def test_views_are_shifted_and_mirrored() -> None:
    """A model sees six views, each once."""
    images = torch.rand(2, 3, 4, 4)
    recorder = Recorder()
    Views(recorder)(images)
    seen = {view.contiguous().numpy().tobytes() for view in recorder.seen}
    expected = set()
    for view in expected_views(images):
        expected.add(view.numpy().tobytes())
        expected.add(view.flip(3).numpy().tobytes())
    assert len(recorder.seen) == len(expected) == 6
    assert seen == expected


def test_image_itself_counts_half() -> None:
    """The logits are means, in which both shifts together count as much as the image."""
    images = torch.rand(2, 3, 5, 5)
    model = Recorder()
    expected = torch.zeros(2, 3 * 5 * 5)
    for view, weight in zip(expected_views(images), (1 / 2, 1 / 4, 1 / 4), strict=True):
        expected += weight * (model(view) + model(view.flip(3))) / 2
    torch.testing.assert_close(Views(model)(images), expected)
