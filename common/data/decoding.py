"""Encoded images of a data set as pixels of one size: all at once, or one by one."""

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from common.console import say
from common.data.cache import write_array
from common.data.parquet import ParquetTables
from common.data.pixels import GREY_MODES, deep_pixels, image_to_pixels, white_level_of
from common.data.sources import DataSource
from common.data.tables import Tables
from common.errors import UserError
from common.files import reading

if TYPE_CHECKING:
    from datasets import Dataset

NAMES_FILE = "_files.json"  # after a split's name: its images' paths, in their order
DECODED_BYTES = 2**26  # of images that are held at once
LOOKED_AT = 1024  # images that stand for all where they are streamed
LARGEST_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


class Shape(NamedTuple):
    """How images are decoded, as those of one split have it or a model wants it."""

    size: int  # height and width, in pixels
    channels: int  # 1 or 3
    white_level: int | None  # the value of white in images of more than 8 bits; None: none has
    is_resized: bool  # whether one or more of the images have another size


def prepare_images(
    source: DataSource,
    folder: Path,
    size: int | None,
    image_column: str | None,
    label_column: str | None,
    channels: int | None = None,
    white_level: int | None = None,
) -> dict[str, Any]:
    """Write all images as uint8 arrays of one size, and their labels; return facts.

    Or where the rows of parquet files are, and facts by some of their images. Size, channels and
    white level are those of the training images where they are None.
    """
    import datasets

    table = (ParquetTables if source.streaming else Tables)(source, label_column)
    candidates = table.columns_of(datasets.Image)
    (column,) = table.find("--image-column", image_column, candidates, candidates)
    wanted = size, channels, white_level
    if isinstance(table, ParquetTables):
        looked_at = [value for (value,) in table.keep(folder, [column]).look(LOOKED_AT)]
        shape = shape_of(looked_at, source, table.first, *wanted)
        pixels = map(decoder_of(source, table.first, shape), looked_at)
        counts = counts_of(np.stack([*pixels]))
        table.notes.append(f"image size and scaling by {len(looked_at):,} of the images")
    else:
        shape, counts = decode_all(table, column, source, folder, wanted)
    if shape.white_level is not None and white_level is None:
        table.notes.append(f"of more than 8 bits a channel: {shape.white_level:,} is white")
    facts = {"channels": shape.channels, "image_size": shape.size, "white_level": shape.white_level}
    return facts | scaling_by(counts) | table.facts()


def decode_all(
    table: Tables,
    column: str,
    source: DataSource,
    folder: Path,
    wanted: tuple[int | None, int | None, int | None],
) -> tuple[Shape, np.ndarray]:
    """Write the arrays; return how images were decoded, and `counts_of` those of the first split.

    `wanted`: size, channels and white level, None where the images tell.
    """
    import datasets

    for name, split in [*table.splits.items()]:
        table.splits[name] = encoded = split.cast_column(column, datasets.Image(decode=False))
        values = enumerate(encoded[column])  # one after the other: all would fill the memory
        table.keep(name, [row for row, v in values if v and {*v.values()} != {None}], "image")
    shape = shape_of(table.splits[table.first][column], source, table.first, *wanted)
    if shape.is_resized:
        table.notes.append(f"images resized and centre-cropped to {shape.size}×{shape.size}")
    image_bytes = shape.size * shape.size * shape.channels
    needed = len(table) * image_bytes
    if needed > shutil.disk_usage(folder).free:
        raise UserError(
            f"the decoded data take {needed / 2**30:.1f} GiB, which {folder.parent} has not: lower "
            "--image-size, or let XDG_CACHE_HOME name a folder on a larger disk"
        )
    say(f"decoding {len(table):,} images once, for this and later runs")
    at_once = min(256, 1 + DECODED_BYTES // image_bytes)
    counts = np.zeros((shape.channels, 256), dtype=np.int64)

    def decoded(name: str, split: "Dataset", paths: list[str | None]) -> Iterator[np.ndarray]:
        decode = decoder_of(source, name, shape)
        for rows in split.iter(at_once):
            paths.extend(value["path"] for value in rows[column])
            images = np.stack([*pool.map(decode, rows[column])])
            if name == table.first:
                counts[:] += counts_of(images)
            yield images

    with ThreadPoolExecutor() as pool:
        for name, split in table.splits.items():
            paths: list[str | None] = []
            write_array(folder / f"{name}_images.npy", decoded(name, split, paths), len(split))
            write_array(folder / f"{name}_labels.npy", [table.labels[name]], len(split))
            write_names(folder / f"{name}{NAMES_FILE}", paths, source.location)
    return shape, counts


def write_names(file: Path, paths: list[str | None], location: str) -> None:
    """Write the images' paths, relative to the data set's folder; nothing if one has none."""
    if all(paths):
        names = [os.path.relpath(p, location) if os.path.isabs(p) else p for p in paths if p]
        file.write_text(json.dumps(names), encoding="utf-8")


@dataclass(frozen=True)
class Decoder:
    """Makes pixels of the images of a split, as `datasets` holds them: `image_to_pixels`."""

    source: DataSource
    split: str
    size: int
    channels: int
    white_level: int | None = None  # as `image_to_pixels` takes it

    def __call__(self, value: dict[str, Any]) -> np.ndarray:
        with opened(value, self.source, self.split) as image:
            return image_to_pixels(image, self.size, self.channels, self.white_level)


def decoder_of(source: DataSource, split: str, shape: Shape) -> Decoder:
    return Decoder(source, split, shape.size, shape.channels, shape.white_level)


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


def shape_of(
    values: Iterable[dict[str, Any]],
    source: DataSource,
    split: str,
    size: int | None,
    channels: int | None,
    white_level: int | None,
) -> Shape:
    """Look at the images of a split, and return how they are to be decoded."""
    shapes, modes = [], set()
    peak = None
    for value in values:
        with opened(value, source, split) as image:
            shapes.append(image.size)
            modes.add(image.mode)
            pixels, _ = deep_pixels(image)
            if pixels is not None:
                peak = max(peak or 0, int(pixels.max(initial=0)))
    if channels is None:
        channels = 1 if modes <= GREY_MODES else 3
    if white_level is None and peak is not None:
        white_level = white_level_of(peak)
    size = size or min(LARGEST_DEFAULT_SIZE, int(np.median([min(shape) for shape in shapes])))
    return Shape(size, channels, white_level, set(shapes) != {(size, size)})


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
