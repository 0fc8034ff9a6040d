"""Encoded images of any format, size and mode as pixels of one size: all at once, or one by one."""

import io
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

from common.console import say
from common.data.cache import write_array
from common.data.parquet import ParquetTables
from common.data.sources import DataSource
from common.data.tables import Tables
from common.errors import UserError
from common.files import reading

if TYPE_CHECKING:
    from datasets import Dataset

DECODED_BYTES = 2**26  # of images that are held at once
LOOKED_AT = 1024  # images that stand for all where they are streamed
LARGEST_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


def prepare_images(
    source: DataSource,
    folder: Path,
    size: int | None,
    image_column: str | None,
    label_column: str | None,
) -> dict[str, Any]:
    """Write all images as uint8 arrays of one size, and their labels; return facts.

    Or where the rows of parquet files are, and facts by some of their images.
    """
    import datasets

    table = (ParquetTables if source.streaming else Tables)(source, label_column)
    found = table.columns_of(datasets.Image)
    (column,) = table.find("--image-column", image_column, found, found)
    if isinstance(table, ParquetTables):
        looked_at = [value for (value,) in table.keep(folder, [column]).look(LOOKED_AT)]
        size, channels, _ = shape_of(looked_at, source, size)
        pixels = map(Decoder(source, "train", size, channels), looked_at)
        counts = counts_of(np.stack([*pixels]))
        table.notes.append(f"image size and scaling by {len(looked_at):,} of the images")
    else:
        size, channels, counts = decode_all(table, column, source, folder, size)
    return {"channels": channels, "image_size": size} | scaling_by(counts) | table.facts()


def decode_all(
    table: Tables, column: str, source: DataSource, folder: Path, size: int | None
) -> tuple[int, int, np.ndarray]:
    """Write the arrays; return the images' size and channels, and `counts_of` those of train."""
    import datasets

    for name, split in [*table.splits.items()]:
        table.splits[name] = encoded = split.cast_column(column, datasets.Image(decode=False))
        held = enumerate(encoded[column])  # one after the other: all would fill the memory
        table.keep(name, [row for row, v in held if v and {*v.values()} != {None}], "image")
    size, channels, alike = shape_of(table.splits["train"][column], source, size)
    if not alike:
        table.notes.append(f"images resized and centre-cropped to {size}×{size}")
    if (needed := len(table) * size * size * channels) > shutil.disk_usage(folder).free:
        raise UserError(
            f"the decoded data take {needed / 2**30:.1f} GiB, which {folder.parent} has not: lower "
            "--image-size, or let XDG_CACHE_HOME name a folder on a larger disk"
        )
    say(f"decoding {len(table):,} images once, for this and later runs")
    at_once = min(256, 1 + DECODED_BYTES // (size * size * channels))
    counts = np.zeros((channels, 256), dtype=np.int64)

    def decoded(name: str, split: "Dataset") -> Iterator[np.ndarray]:
        decode = Decoder(source, name, size, channels)
        for rows in split.iter(at_once):
            images = np.stack([*pool.map(decode, rows[column])])
            if name == "train":
                counts[:] += counts_of(images)
            yield images

    with ThreadPoolExecutor() as pool:
        for name, split in table.splits.items():
            write_array(folder / f"{name}_images.npy", decoded(name, split), len(split))
            write_array(folder / f"{name}_labels.npy", [table.labels[name]], len(split))
    return size, channels, counts


@dataclass(frozen=True)
class Decoder:
    """Makes pixels of the images of a split, as `datasets` holds them: `image_to_pixels`."""

    source: DataSource
    split: str
    size: int
    channels: int

    def __call__(self, value: dict[str, Any]) -> np.ndarray:
        with opened(value, self.source, self.split) as image:
            return image_to_pixels(image, self.size, self.channels)


@contextmanager
def opened(value: dict[str, Any], source: DataSource, split: str) -> Iterator[Image.Image]:
    """Open one encoded image, whose pixels are read later; its file must be the data set's."""
    path, encoded = value["path"], value["bytes"]
    with reading(f"image {path or f'one of split {split} of {source.name}'}", "mend or remove it"):
        yield Image.open(own_file(path, source) if encoded is None else io.BytesIO(encoded))


def own_file(path: str, source: DataSource) -> str:
    """Return the path of a data set's file, or of one that was fetched or unpacked for it."""
    import datasets
    from huggingface_hub import constants

    file = os.path.normpath(os.path.join(source.location, path))
    roots = source.location, constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE
    if not any(Path(file).is_relative_to(root) for root in roots):
        raise UserError(f"image {path} lies outside of data set {source.location}: leave it out")
    return file


def image_to_pixels(image: Image.Image, size: int, channels: int) -> np.ndarray:
    """Return an image as uint8 [size, size, channels], resized and centre-cropped."""
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # as cameras turn them
        image = ImageOps.exif_transpose(image)
    if image.mode == "F":  # which Pillow would clip, of 0 to 1 to black
        raise ValueError("its pixels are real numbers: write them with 8 or 16 bits")
    if image.mode.startswith("I"):  # of 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels)


def shape_of(
    values: Iterable[dict[str, Any]], source: DataSource, size: int | None
) -> tuple[int, int, bool]:
    """Return the size and channels that training images get, and whether all have this size."""
    shapes, modes = [], set()
    for value in values:
        with opened(value, source, "train") as image:
            shapes.append(image.size)
            modes.add(image.mode)
    channels = 1 if modes <= {"1", "L", "I", "I;16", "F"} else 3
    size = size or min(LARGEST_DEFAULT_SIZE, int(np.median([min(shape) for shape in shapes])))
    return size, channels, set(shapes) == {(size, size)}


def counts_of(images: np.ndarray) -> np.ndarray:
    """Return how often each value of a pixel is in uint8 images: int64 [channels, 256]."""
    channels = range(images.shape[-1])
    return np.stack([np.bincount(images[..., c].ravel(), minlength=256) for c in channels])


def scaling_by(counts: np.ndarray) -> dict[str, list[float]]:
    """Return mean and deviation by channel of pixels scaled to 0 … 1, from `counts_of` them."""
    levels = np.broadcast_to(np.arange(256) / 255, counts.shape)
    mean = np.average(levels, axis=1, weights=counts)
    variance = np.average((levels - mean[:, None]) ** 2, axis=1, weights=counts)
    return {"mean": mean.tolist(), "std": np.sqrt(variance).clip(min=1 / 255).tolist()}
