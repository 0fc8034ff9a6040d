"""Prepares a data set of images for training: decoded once to pixels of one size, or streamed."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.console import say
from common.data.image_decoding.encoded_images import read_images
from common.data.image_decoding.image_files import Decoder, EncodedImage
from common.data.image_decoding.image_format import (
    Examiner,
    choose_format,
    count_pixel_values,
    scaling_from,
)
from common.data.prepared_data.cache import PreparedFacts, write_array
from common.data.reading.tables import Tables
from common.data.sources import DataSource
from common.data.streaming.parquet_tables import ParquetTables
from common.errors import UserError
from common.run_directory.model_records import PixelFormat, RequestedFormat

if TYPE_CHECKING:
    from datasets import Dataset

# The end of the name of a file, after the name of a split. The file has the paths of the split's
# images, in the order of the samples.
PATHS_SUFFIX = "_files.json"
EXAMINED_BYTES = 500  # about the size of an `ExaminedImage`
ROWS_AT_ONCE = 1000  # rows that are looked at together, without a copy of their images
SAMPLED_IMAGES = 1024  # images that are examined before a streamed data set is used


class ImageFacts(PreparedFacts):
    """What is known about a prepared data set of images.

    The entries are those of an `ImageFormat`, which parses them. The first split determines them.
    """

    channels: int
    image_size: int
    white_level: int | None
    mean: list[float]
    std: list[float]


def prepare_images(
    source: DataSource,
    folder: Path,
    size: int | None,
    image_column: str | None,
    label_column: str | None,
    channels: int | None = None,
    white_level: int | None = None,
) -> ImageFacts:
    """Fill a cache folder with a data set of images, and return facts about it, for `cache.cached`.

    The folder gets, for each split, uint8 images [samples, size, size, channels] and int64 labels
    [samples]. A streamed data set is not decoded now: the folder gets the places of its row groups,
    and the facts are measured on a sample of the images.

    Args:
        size: height and width in pixels. Like `channels` and `white_level`, it is inferred from the
            first split (train, if there is one) if it is None.
        image_column: the value of `--image-column`.
        label_column: the value of `--label-column`.

    Raises:
        UserError: the data can't be read, there is no column of images, an image can't be decoded,
            or the disk has too little space for the decoded images.
    """
    import datasets

    table_class = ParquetTables if source.streaming else Tables
    table = table_class(source, label_column)
    candidates = table.columns.of_types(datasets.Image)
    # Without the flag, the only column of images is taken; the flag may name any such column.
    (column,) = table.columns.choose("--image-column", image_column, candidates, candidates)
    requested = RequestedFormat(size, channels, white_level)
    if isinstance(table, ParquetTables):
        pixel_format, pixel_counts = prepare_streamed_images(
            table, column, source, folder, requested
        )
    else:
        pixel_format, pixel_counts = prepare_decoded_images(
            table, column, source, folder, requested
        )
    # A requested white level is that of the evaluated model, so only an inferred one gets a note.
    if pixel_format.white_level is not None and white_level is None:
        white = f"{pixel_format.white_level:,}"
        table.notes.append(f"images have more than 8 bits a channel: {white} is white")
    mean, std = scaling_from(pixel_counts)
    return {
        "channels": pixel_format.channels,
        "image_size": pixel_format.image_size,
        "white_level": pixel_format.white_level,
        "mean": mean,
        "std": std,
        **table.facts(),
    }


def prepare_streamed_images(
    table: ParquetTables,
    column: str,
    source: DataSource,
    folder: Path,
    requested: RequestedFormat,
) -> tuple[PixelFormat, np.ndarray]:
    """Write the places of the row groups; find the format and the scaling of the images.

    Both come from a sample of the first split, because not all images are decoded in advance.

    Args:
        column: the column of images.

    Returns:
        The format for all images, and how often each value of a pixel occurs in the sampled ones:
        see `count_pixel_values`.
    """
    rows = table.write_groups(folder, [column])  # those of the first split
    images: list[EncodedImage] = [image for (image,) in rows.sample(SAMPLED_IMAGES)]
    examine = Examiner(source, table.first_role)
    pixel_format, _ = choose_format(map(examine, images), requested)
    decode = Decoder(source, table.first_role, pixel_format)
    pixel_counts = count_pixel_values(np.stack([decode(image) for image in images]))
    table.notes.append(f"image size and scaling come from {len(images):,} of the images")
    return pixel_format, pixel_counts


def prepare_decoded_images(
    table: Tables,
    column: str,
    source: DataSource,
    folder: Path,
    requested: RequestedFormat,
) -> tuple[PixelFormat, np.ndarray]:
    """Decode all images, and write them, their labels and their paths to `folder`.

    Args:
        column: the column of images.

    Returns:
        The format of the images, and the counts of pixel values, by channel, in the images of the
        first split: see `count_pixel_values`.
    """
    disable_decoding(table, column)
    drop_missing_images(table, column)
    pixel_format, is_resized = format_of_split(table, column, source, requested)
    size = pixel_format.image_size
    if is_resized:
        table.notes.append(f"images resized and centre-cropped to {size}×{size}")
    image_bytes = size * size * pixel_format.channels
    require_disk_space(len(table) * image_bytes, folder)
    say(f"decoding {len(table):,} images once, for this and later runs")
    pixel_counts = np.zeros((pixel_format.channels, 256), dtype=np.int64)
    for name, split in table.splits.items():
        decode = Decoder(source, name, pixel_format)
        batches: Iterator[np.ndarray] = map(
            np.stack, read_images(split, column, decode, image_bytes)
        )
        if name == table.first_role:
            batches = counting_pixels(batches, pixel_counts)
        write_array(folder / f"{name}_images.npy", batches, len(split))
        write_array(folder / f"{name}_labels.npy", [table.labels[name]], len(split))
        write_paths(folder / f"{name}{PATHS_SUFFIX}", paths_of(split, column), source.location)
    return pixel_format, pixel_counts


def format_of_split(
    table: Tables, column: str, source: DataSource, requested: RequestedFormat
) -> tuple[PixelFormat, bool]:
    """Return the format for all images, and whether the first split has images of another size.

    All images of the first split are examined: see `choose_format`.
    """
    examine = Examiner(source, table.first_role)
    split = table.splits[table.first_role]
    lists = read_images(split, column, examine, EXAMINED_BYTES)
    return choose_format(chain.from_iterable(lists), requested)


def disable_decoding(table: Tables, column: str) -> None:
    """Have `datasets` return the images of all splits as `EncodedImage`.

    Our own later steps decode the images, in threads or processes and to the right size.
    """
    import datasets

    for name, split in table.splits.items():
        table.splits[name] = split.cast_column(column, datasets.Image(decode=False))


def drop_missing_images(table: Tables, column: str) -> None:
    """Drop the rows of all splits without an image, and note how many.

    Args:
        column: the column of images, which `disable_decoding` has set up.
    """
    # `keep` may remove a split, so the loop goes over a copy of the dict's items.
    for name, split in list(table.splits.items()):
        is_there = ~missing_images(split, column)
        if not is_there.all():
            table.keep(name, np.flatnonzero(is_there).tolist(), "image")


def missing_images(split: "Dataset", column: str) -> np.ndarray:
    """Return for each row whether its image has neither a path nor the bytes: bool [rows]."""
    import pyarrow.compute

    parts = [np.zeros(0, dtype=bool)]
    # In parts, because the whole column might not fit into memory.
    for rows in split.with_format("arrow").iter(ROWS_AT_ONCE):
        images = rows.column(column)
        # In a row without an image, both fields are null as well.
        has_no_bytes = pyarrow.compute.is_null(pyarrow.compute.struct_field(images, "bytes"))
        has_no_path = pyarrow.compute.is_null(pyarrow.compute.struct_field(images, "path"))
        parts.append(pyarrow.compute.and_(has_no_bytes, has_no_path).to_numpy())
    return np.concatenate(parts)


def require_disk_space(needed_bytes: int, folder: Path) -> None:
    """Raise a `UserError` if the disk of `folder` has less free space than needed."""
    # `folder` has a temporary name until it is complete, so the message names its parent.
    if needed_bytes > shutil.disk_usage(folder).free:
        raise UserError(
            (
                f"the decoded images take {needed_bytes / 2**30:.1f} GiB, but {folder.parent} has "
                "less free space"
            ),
            advice=(
                "free some space, set XDG_CACHE_HOME to a folder on a larger disk, or start a new "
                "run with a lower --image-size"
            ),
        )


def counting_pixels(
    batches: Iterable[np.ndarray], pixel_counts: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the batches of images, and add the counts of each to `pixel_counts`, in place.

    So the pixels are counted while the images are written, and no image is decoded again for the
    scaling.

    Args:
        pixel_counts: int64 [channels, 256]; see `count_pixel_values`.
    """
    for images in batches:
        pixel_counts += count_pixel_values(images)
        yield images


def paths_of(split: "Dataset", column: str) -> Iterator[str | None]:
    """Yield the path of each image of a split; None for an image without one."""
    import pyarrow.compute

    for rows in split.with_format("arrow").iter(ROWS_AT_ONCE):
        yield from pyarrow.compute.struct_field(rows.column(column), "path").to_pylist()


def write_paths(file: Path, paths: Iterable[str | None], location: str) -> None:
    """Write the paths of images as JSON, relative to the data set's folder.

    `ImageSamples.files` reads them, so that a tracker can show which file an image comes from.
    Nothing is written if an image has no path, because positions in the list would no longer be
    sample indices.

    Args:
        location: the location of the `DataSource`.
    """
    relative_paths = []
    for path in paths:
        if not path:
            return
        relative_paths.append(path_in_data_set(path, location))
    file.write_text(json.dumps(relative_paths), encoding="utf-8")


def path_in_data_set(path: str, location: str) -> str:
    """Return the path of an image relative to the data set's folder.

    A relative path, such as one in a parquet file, is returned as it is. An image of the Hub is in
    the cache of `datasets`, whose folders say nothing about it, so only its file name is returned.

    Args:
        location: the location of the `DataSource`.
    """
    if not os.path.isabs(path):
        return path
    if not os.path.isabs(location):
        return os.path.basename(path)
    return os.path.relpath(path, location)
