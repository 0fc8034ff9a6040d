"""Shifts and mirrors the images of a training batch, each differently, as augmentation.

A few operations serve the whole batch.
"""

import torch


def shifted(
    images: torch.Tensor,
    tops: torch.Tensor,
    lefts: torch.Tensor,
    is_mirrored: torch.Tensor | None,
    padding: int,
) -> torch.Tensor:
    """Extend images by reflection at the border, cut a window out of each, and mirror some windows.

    A window has the size of the original image. A CPU copies the memory of a window several times
    faster than it looks up the window's pixels one by one. An accelerator gathers the pixels in one
    pass. Both ways give the same images.

    Args:
        images: uint8 [batch, height, width, channels].
        tops: int64 [batch], the first row of each window in its extended image, 0 … 2 * padding.
        lefts: int64 [batch], the first column of each window in its extended image, which is not
            mirrored; 0 … 2 * padding.
        is_mirrored: bool [batch], whether each window is mirrored; None: no window is mirrored.
        padding: pixels by which images are extended at each side; less than height and width.

    Returns:
        uint8 [batch, height, width, channels]; not always contiguous, because there may be gaps
        between the rows in memory.
    """
    if images.device.type == "cpu":
        return copied_windows(images, tops, lefts, is_mirrored, padding)
    return gathered_pixels(images, tops, lefts, is_mirrored, padding)


def copied_windows(
    images: torch.Tensor,
    tops: torch.Tensor,
    lefts: torch.Tensor,
    is_mirrored: torch.Tensor | None,
    padding: int,
) -> torch.Tensor:
    """Return the windows that `shifted` cuts out, by copying the memory that each window spans."""
    count, height, width, channels = images.shape
    if is_mirrored is not None:
        # Mirror the image instead of the window, whose memory is copied as it is. The window's
        # first column is then counted from the image's other side.
        images = torch.where(is_mirrored[:, None, None, None], images.flip(2), images)
        lefts = torch.where(is_mirrored, 2 * padding - lefts, lefts)
    padded = mirror_padded(mirror_padded(images, 1, padding), 2, padding)
    _, padded_height, padded_width, _ = padded.shape
    first_rows = torch.arange(count) * padded_height + tops
    first_pixels = first_rows * padded_width + lefts
    # The bytes from a window's first pixel to its last, with the pixels between the window's rows.
    span = ((height - 1) * padded_width + width) * channels
    # `spans` is [batch, span]. With the step `channels`, an index of `unfold` counts pixels.
    # `as_strided` leaves out the pixels between the rows, without a copy.
    spans = padded.flatten().unfold(0, span, channels).index_select(0, first_pixels)
    return spans.as_strided(images.shape, (span, padded_width * channels, channels, 1))


def mirror_padded(images: torch.Tensor, dimension: int, padding: int) -> torch.Tensor:
    """Extend images at both ends of a dimension by their reflection at the border.

    The pixels at the border itself are not repeated.

    Args:
        images: [batch, height, width, channels].
        dimension: 1 for rows, 2 for columns.
        padding: pixels by which images are extended at each end; less than their size.
    """
    before = images.narrow(dimension, 1, padding).flip(dimension)
    last = images.shape[dimension] - 1
    after = images.narrow(dimension, last - padding, padding).flip(dimension)
    return torch.cat([before, images, after], dimension)


def gathered_pixels(
    images: torch.Tensor,
    tops: torch.Tensor,
    lefts: torch.Tensor,
    is_mirrored: torch.Tensor | None,
    padding: int,
) -> torch.Tensor:
    """Return the windows that `shifted` cuts out, by gathering all pixels in one operation."""
    count, height, width, _ = images.shape
    device = images.device
    image_numbers = torch.arange(count, device=device)
    ys = torch.arange(height, device=device)
    xs = torch.arange(width, device=device)
    if is_mirrored is not None:
        xs = torch.where(is_mirrored[:, None], width - 1 - xs, xs)  # [batch, width]
    # The rows and columns of the image that each window shows: [batch, height] and [batch, width].
    ys = reflected(ys + (tops - padding)[:, None], height)
    xs = reflected(xs + (lefts - padding)[:, None], width)
    return images[image_numbers[:, None, None], ys[:, :, None], xs[:, None, :]]


def reflected(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Replace positions outside 0 … size - 1 by their reflections at the border.

    Positions may be at most size - 1 below or above this range.
    """
    last = size - 1
    # The inner `abs` reflects positions below 0, and the outer `abs` positions above `last`.
    return last - (last - positions.abs()).abs()
