"""Decodes the images of a data set to pixels of one size: all in advance, or each when needed."""

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from common.console import say
from common.data.cache import PreparedFacts, write_array
from common.data.encoded_images import EncodedImage, read_images
from common.data.parquet import ParquetTables
from common.data.pixels import (
    GREY_MODES,
    RequestedFormat,
    deep_pixels,
    image_to_pixels,
    white_level_of,
)
from common.data.sources import DataSource
from common.data.tables import Tables
from common.errors import UserError
from common.failures.sentences import reading
from common.run_directory.records import PixelFormat

if TYPE_CHECKING:
    from datasets import Dataset

# The end of the name of a file, after the name of a split. The file has the paths of the split's
# images, in the order of the samples.
PATHS_SUFFIX = "_files.json"
EXAMINED_BYTES = 500  # about the size of an `ExaminedImage`
ROWS_AT_ONCE = 1000  # rows of a table that are in memory at once
SAMPLED_IMAGES = 1024  # images that are examined before a streamed data set is used
MAX_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


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
    """Fill a cache folder with a data set of images, and return facts about it.

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
    candidates = table.columns_of(datasets.Image)
    # Without the flag, the only column of images is taken; the flag may name any such column.
    (column,) = table.choose_columns("--image-column", image_column, candidates, candidates)
    requested = RequestedFormat(size, channels, white_level)
    if isinstance(table, ParquetTables):
        pixel_format, pixel_counts = prepare_streamed_images(
            table, column, source, folder, requested
        )
    else:
        pixel_format, pixel_counts = prepare_whole_images(table, column, source, folder, requested)
    # A requested white level is that of the evaluated model, so only an inferred one gets a note.
    if pixel_format.white_level is not None and white_level is None:
        white = f"{pixel_format.white_level:,}"
        table.notes.append(f"images have more than 8 bits a channel: {white} is white")
    mean, std = scaling_by(pixel_counts)
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
    """Write the places of the row groups, and decode a sample of the images of the first split.

    Args:
        column: the column of images.

    Returns:
        The format for all images, and how often each value of a pixel occurs in the sampled ones:
        see `count_pixel_values`.
    """
    rows = table.write_groups(folder, [column])
    images: list[EncodedImage] = [image for (image,) in rows.sample(SAMPLED_IMAGES)]
    examine = Examiner(source, table.first_role)
    pixel_format, _ = choose_format(map(examine, images), requested)
    decode = Decoder(source, table.first_role, pixel_format)
    pixel_counts = count_pixel_values(np.stack([decode(image) for image in images]))
    table.notes.append(f"image size and scaling come from {len(images):,} of the images")
    return pixel_format, pixel_counts


def prepare_whole_images(
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
        The format of the images, and how often each value of a pixel occurs in those of the first
        split: see `count_pixel_values`.
    """
    read_undecoded(table, column)
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
    """Examine all images of the first split; see `choose_format`."""
    examine = Examiner(source, table.first_role)
    split = table.splits[table.first_role]
    lists = read_images(split, column, examine, EXAMINED_BYTES)
    return choose_format(chain.from_iterable(lists), requested)


def read_undecoded(table: Tables, column: str) -> None:
    """Have `datasets` return the images of all splits as `EncodedImage`.

    Later steps decode the images themselves, in threads and to the right size.
    """
    import datasets

    for name, split in table.splits.items():
        table.splits[name] = split.cast_column(column, datasets.Image(decode=False))


def drop_missing_images(table: Tables, column: str) -> None:
    """Drop the rows of all splits without an image, and note how many.

    Args:
        column: the column of images, which `read_undecoded` has set up.
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
        # A missing image has no fields, so they are missing, too.
        is_missing = pyarrow.compute.and_(
            *(
                pyarrow.compute.is_null(pyarrow.compute.struct_field(images, field))
                for field in ("bytes", "path")
            )
        )
        parts.append(is_missing.to_numpy())
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
    for rows in split.with_format("arrow").iter(ROWS_AT_ONCE):
        yield from rows.column(column).combine_chunks().field("path").to_pylist()


def write_paths(file: Path, paths: Iterable[str | None], location: str) -> None:
    """Write the paths of images as JSON, relative to the data set's folder.

    `ImageSamples.files` reads them. Nothing is written if an image has no path, because positions
    in the list would no longer be sample indices.

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

    Images of the Hub are in the cache of `datasets`, whose folders say nothing about the image. So
    only its name is returned.

    Args:
        location: the location of the `DataSource`.
    """
    if not os.path.isabs(path):
        return path
    if not os.path.isabs(location):
        return os.path.basename(path)
    return os.path.relpath(path, location)


@dataclass(frozen=True)
class Decoder:
    """Decodes images of one split to the pixels of a format; see `image_to_pixels`.

    It can be pickled, so that workers can use it.
    """

    source: DataSource
    split: str  # for messages
    pixel_format: PixelFormat

    def __call__(self, encoded: EncodedImage) -> np.ndarray:
        name = name_of(encoded, self.source, self.split)
        with opened_image(encoded, self.source, name) as image:
            return image_to_pixels(image, self.pixel_format, name)


def name_of(encoded: EncodedImage, source: DataSource, split: str) -> str:
    """Return what a message calls an image: its path, or the split if it has none."""
    path = encoded["path"]
    return f"image {path}" if path else f"an image of split {split} of data set {source.name}"


@contextmanager
def opened_image(encoded: EncodedImage, source: DataSource, name: str) -> Iterator[Image.Image]:
    """Open one encoded image; Pillow reads its pixels later, within this context.

    Args:
        name: what a message calls the image, from `name_of`.

    Raises:
        UserError: the image can't be read, or its path leads out of the data set.
    """
    path = encoded["path"]
    contents = encoded["bytes"]
    advice = "replace or remove this image"
    with reading(name, advice):
        if contents is not None:
            yield Image.open(io.BytesIO(contents))
        elif path is not None:
            yield Image.open(own_file(path, source))
        else:
            raise UserError(f"{name} has neither bytes nor a path", advice=advice)


def own_file(path: str, source: DataSource) -> str:
    """Return the absolute path of a file of the data set.

    A table that somebody else wrote may name any file of the user. So only files in the data set's
    folder may be opened, and files that were downloaded or unpacked for it.

    Args:
        path: an absolute path, or a path from the data set's folder.

    Raises:
        UserError: the path leads elsewhere.
    """
    import datasets
    from huggingface_hub import constants

    file = os.path.normpath(os.path.join(source.location, path))
    allowed_folders = (
        source.location,
        constants.HF_HUB_CACHE,
        datasets.config.HF_DATASETS_CACHE,
    )
    if not any(Path(file).is_relative_to(folder) for folder in allowed_folders):
        raise outside_error(path, source)
    return file


def outside_error(path: str, source: DataSource) -> UserError:
    """Return the error for a row whose image is not a file of its data set."""
    if not os.path.isdir(source.location):
        return UserError(
            f"image {path} can't be read, because data set {source.location} is not a folder that "
            "contains this image",
            advice="pass a folder that contains the table and its images as --dataset",
        )
    return UserError(
        f"image {path} is not inside the folder of data set {source.location}",
        advice=(
            "copy the image into this folder and write the path of the copy into the table, or "
            "remove its row"
        ),
    )


class ExaminedImage(NamedTuple):
    """What decides to which format the images of a data set are decoded."""

    size: tuple[int, int]  # width and height
    mode: str  # Pillow's name for the kind of the pixels
    peak: int | None  # the largest value of a pixel; None if no channel has more than 8 bits


@dataclass(frozen=True)
class Examiner:
    """Examines images of one split, most of them without decoding them.

    It can be pickled, so that workers can use it.
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
        images: those of the first split.

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

    The counts of many batches can be added, and `scaling_by` computes the scaling from them.

    Args:
        images: uint8 [images, height, width, channels].

    Returns:
        int64 [channels, 256].
    """
    channels = range(images.shape[-1])
    return np.stack(
        [np.bincount(images[..., channel].ravel(), minlength=256) for channel in channels]
    )


def scaling_by(pixel_counts: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel, of pixels scaled to 0 … 1.

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
