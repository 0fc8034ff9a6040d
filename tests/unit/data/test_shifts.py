"""Shifts and mirrors: those of numpy, whichever way a device makes them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data.image_batches.shifts import copied_windows, gathered_pixels


def expected(image: np.ndarray, top: int, left: int, is_mirrored: bool, padding: int) -> np.ndarray:
    """Return the window of one image [height, width, channels], cut by numpy."""
    if is_mirrored:
        image = image[:, ::-1]
        left = 2 * padding - left
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode="reflect")
    return padded[top : top + height, left : left + width]


@given(
    count=st.integers(1, 4),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    channels=st.sampled_from([1, 3]),
    draw=st.data(),
)
def test_windows_are_those_of_numpy(
    count: int, height: int, width: int, channels: int, draw: st.DataObject
) -> None:
    """Both ways give each image its own window, at any size, and leave the images as they are."""
    padding = draw.draw(st.integers(0, min(height, width) - 1))
    flips = draw.draw(st.booleans())
    random = np.random.default_rng(draw.draw(st.integers(0, 2**32 - 1)))
    images = random.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    tops, lefts = random.integers(0, 2 * padding + 1, (2, count))
    is_mirrored = random.integers(0, 2, count).astype(bool) & flips
    windows = [
        expected(*arguments, padding)
        for arguments in zip(images, tops, lefts, is_mirrored, strict=True)
    ]
    before = images.copy()
    for cut in (copied_windows, gathered_pixels):
        windows_cut = cut(
            torch.from_numpy(images),
            torch.from_numpy(tops),
            torch.from_numpy(lefts),
            torch.from_numpy(is_mirrored) if flips else None,
            padding,
        )
        assert np.array_equal(windows_cut, np.stack(windows)), cut.__name__
    assert np.array_equal(images, before)
