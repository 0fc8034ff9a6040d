"""Decode all images of a data set to uint8 arrays of one size."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from common.cache import CachedData
from common.console import say
from common.datasets import RawData, existing_column
from common.errors import UserError
from common.sources import DataSource

if TYPE_CHECKING:
    from datasets import Dataset

LARGEST_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


def decode_images(
    target: CachedData, raw: RawData, source: DataSource, size: int | None, column: str | None
) -> None:
    """Decode all images of `raw` into uint8 arrays of one size, and write them to the cache."""
    import datasets

    column = find_image_column(raw.splits["train"], column, source.name)
    encoded: dict[str, Dataset] = {}
    for name, split in raw.splits.items():
        encoded[name] = split.cast_column(column, datasets.Image(decode=False))
        present = [row for row, value in enumerate(encoded[name][column]) if value is not None]
        if len(present) < len(encoded[name]):
            missing = len(encoded[name]) - len(present)
            raw.notes.append(f"{name}: {missing:,} rows without an image are left out")
            encoded[name] = encoded[name].select(present)
            raw.labels[name] = raw.labels[name][present]
    shapes, modes = [], set()
    for rows in encoded["train"].iter(1024):
        for value in rows[column]:
            image = open_image(value, source, "train")
            shapes.append(image.size)
            modes.add(image.mode)
    channels = 1 if modes <= {"1", "L", "I", "I;16", "F"} else 3
    if size is None:
        size = min(LARGEST_DEFAULT_SIZE, int(np.median([min(shape) for shape in shapes])))
    if set(shapes) != {(size, size)}:
        raw.notes.append(f"images resized and centre-cropped to {size}×{size}")
    total = sum(len(split) for split in encoded.values())
    target.require_space(total * size * size * channels)
    say(f"decoding {total:,} images once, for this and later runs")
    histograms = {}
    for name, split in encoded.items():
        images = target.create(f"{name}_images", np.uint8, (len(split), size, size, channels))
        counts = np.zeros((channels, 256), dtype=np.int64)  # of the pixel values, by channel
        decode = partial(to_pixels, size=size, channels=channels, source=source, split=name)
        position = 0
        with ThreadPoolExecutor() as pool:
            for rows in split.iter(256):
                first = position
                for pixels in pool.map(decode, rows[column]):
                    images[position] = pixels
                    position += 1
                for channel in range(channels):
                    values = images[first:position, ..., channel].ravel()
                    counts[channel] += np.bincount(values, minlength=256)
        histograms[name] = counts
        target.save(f"{name}_labels", raw.labels[name])
    histogram = histograms["train"]
    means = [float(np.average(np.arange(256), weights=counts)) / 255 for counts in histogram]
    variances = [
        float(np.average((np.arange(256) / 255 - mean) ** 2, weights=counts))
        for mean, counts in zip(means, histogram, strict=True)
    ]
    target.facts = {
        "splits": list(encoded),
        "class_names": raw.class_names,
        "channels": channels,
        "image_size": size,
        "mean": means,
        "std": [max(variance**0.5, 1 / 255) for variance in variances],
        "notes": raw.notes,
    }


def find_image_column(split: Dataset, asked: str | None, name: str) -> str:
    """Return the column of images: named, or the only one of that type.

    Raises:
        UserError: when there is none, or more than one and none named.
    """
    from datasets import Image

    columns = [column for column, kind in split.features.items() if isinstance(kind, Image)]
    if asked is not None:
        existing_column(split, asked, "--image-column", name)
        columns = [column for column in columns if column == asked]
    if len(columns) != 1:
        found = ", ".join(f"{c} ({type(k).__name__})" for c, k in split.features.items())
        what = "several columns of images: name one with --image-column" if columns else "no images"
        raise UserError(f"data set {name} has {what}; its columns: {found}")
    return columns[0]


def open_image(value: dict[str, Any], source: DataSource, split: str) -> Any:
    """Open one encoded image; its pixels are read later.

    Raises:
        UserError: naming the image, when it can't be decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"]))
    except (UnidentifiedImageError, OSError) as problem:
        where = value["path"] or f"one of split {split} of {source.location}"
        raise UserError(f"image {where} can't be decoded ({problem}): mend or remove it") from None


def to_pixels(
    value: dict[str, Any], size: int, channels: int, source: DataSource, split: str
) -> np.ndarray:
    """Decode one image to uint8 [size, size, channels]."""
    try:
        image = open_image(value, source, split)
        return image_to_pixels(image, size, channels)
    except (OSError, SyntaxError) as problem:
        where = value["path"] or f"one of split {split} of {source.location}"
        raise UserError(f"image {where} is damaged ({problem}): mend or remove it") from None


def image_to_pixels(image: Any, size: int, channels: int) -> np.ndarray:
    """Return a Pillow image as uint8 [size, size, channels], resized and centre-cropped."""
    from PIL import Image, ImageOps

    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels)
