"""Chooses the format to which the images of a data set are decoded, and the scaling of pixels."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.data.image_decoding.image_files import EncodedImage, name_of, opened_image
from common.data.image_decoding.pixels import GREY_MODES, deep_pixels, white_level_of
from common.data.sources import DataSource
from common.run_directory.model_records import PixelFormat, RequestedFormat

MAX_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


class ExaminedImage(NamedTuple):
    """What decides to which format the images of a data set are decoded."""

    size: tuple[int, int]  # width and height
    mode: str  # Pillow's name for the kind of the pixels
    peak: int | None  # the largest value of a pixel; None if no channel has more than 8 bits


@dataclass(frozen=True)
class Examiner:
    """Examines images of one split, most of them without decoding them.

    Only images of more than 8 bits a channel are decoded, to find their largest value.

    An examiner can be pickled, so that workers can use it.
    """

    source: DataSource
    split: str  # for messages

    def __call__(self, encoded: EncodedImage) -> ExaminedImage:
        """Return the facts about an image.

        Raises:
            UserError: it can't be read, or its pixels are real numbers or negative.
        """
        name = name_of(encoded, self.source, self.split)
        with opened_image(encoded, self.source, name) as image:
            size = image.size
            mode = image.mode
            pixels, _ = deep_pixels(image, name)
        return ExaminedImage(size, mode, None if pixels is None else int(pixels.max(initial=0)))


def choose_format(
    images: Iterable[ExaminedImage], requested: RequestedFormat
) -> tuple[PixelFormat, bool]:
    """Choose the format to which all images of a data set are decoded.

    The requested values are taken as they are. Otherwise:

    - There is one channel if all images are grey, and three if not.
    - The size is the median of the shorter sides, but at most `MAX_DEFAULT_SIZE`.
    - The white level follows from the largest value of a pixel in images of more than 8 bits a
      channel. It is None if there are no such images.

    Args:
        images: those of the first split, or a sample of them.

    Returns:
        The format, and whether one or more of the images have another size.
    """
    sizes: list[tuple[int, int]] = []
    modes: set[str] = set()
    peak: int | None = None  # largest value of a pixel in images of more than 8 bits
    for image in images:
        sizes.append(image.size)
        modes.add(image.mode)
        if image.peak is not None:
            peak = max(peak or 0, image.peak)
    channels = requested.channels
    if channels is None:
        channels = 1 if modes <= GREY_MODES else 3
    white_level = requested.white_level
    if white_level is None and peak is not None:
        white_level = white_level_of(peak)
    size = requested.image_size
    if not size:
        median = int(np.median([min(image_size) for image_size in sizes]))
        size = min(MAX_DEFAULT_SIZE, median)
    pixel_format = PixelFormat(channels=channels, image_size=size, white_level=white_level)
    return pixel_format, set(sizes) != {(size, size)}


def count_pixel_values(images: np.ndarray) -> np.ndarray:
    """Count how often each value of a pixel occurs in each channel.

    The counts of many batches can be added, and `scaling_from` computes the scaling from them.

    Args:
        images: uint8 [images, height, width, channels].

    Returns:
        int64 [channels, 256].
    """
    channels = range(images.shape[-1])
    return np.stack(
        [np.bincount(images[..., channel].ravel(), minlength=256) for channel in channels]
    )


def scaling_from(pixel_counts: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel, of pixels from 0 to 1.

    Args:
        pixel_counts: int64 [channels, 256], from `count_pixel_values`.
    """
    # The values 0 … 255 of a pixel, scaled to 0 … 1: [channels, 256], the shape of the counts.
    levels = np.broadcast_to(np.arange(256) / 255, pixel_counts.shape)
    mean = np.average(levels, axis=1, weights=pixel_counts)
    variance = np.average((levels - mean[:, None]) ** 2, axis=1, weights=pixel_counts)
    # A channel with a single value has the deviation 0. Pixels are divided by the deviation later,
    # so it is at least the distance of two levels.
    std = np.sqrt(variance).clip(min=1 / 255)
    return mean.tolist(), std.tolist()
