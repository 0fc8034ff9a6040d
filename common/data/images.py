"""Images: decoded once to uint8, cached, memory-mapped; batches made on the device."""

import functools
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
import torch
from PIL import ExifTags, Image, ImageOps

from common.console import say
from common.data.batch import Batch, Data, TensorSamples, without_waiting
from common.data.cache import cached, write_array
from common.data.order import random_bits
from common.data.parquet import Index, ParquetRows, read_index
from common.data.sources import DataSource
from common.data.tables import READS, find_columns, load_raw
from common.errors import UserError
from common.files import reading
from common.initial import initial_facts
from common.machine import local_world_size, usable_cores

if TYPE_CHECKING:
    from datasets import Dataset

DECODED_BYTES = 2**26  # of images that are held at once
LOOKED_AT = 1024  # images that stand for all where they are streamed
LARGEST_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


class ImageSamples(TensorSamples):
    """One split: uint8 images [samples, height, width, channels] and int64 labels [samples]."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: list[float],
        std: list[float],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(images=images, labels=labels)
        self.mean, self.std, self.dtype = mean, std, dtype
        self.crop_padding = 0  # pixels by which a training image is shifted at most
        self.flip = False  # whether half of the training images are mirrored

    @property
    def images(self) -> np.ndarray:
        return np.asarray(self.arrays["images"])

    @property
    def labels(self) -> np.ndarray:
        return np.asarray(self.arrays["labels"])

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Augment the images of a training batch, and scale pixels to mean 0 and deviation 1."""
        images = batch["images"]
        if epoch is not None and (self.crop_padding or self.flip):
            bits = random_bits(self.seed, epoch, samples)
            images = self.augmented(images, without_waiting(bits, images.device))
        shift, scale = pixel_scaling(*self.mean, *self.std, device=images.device, dtype=self.dtype)
        images = images.to(self.dtype).sub_(shift).mul_(scale).permute(0, 3, 1, 2)
        return {"images": images, "labels": batch["labels"]}

    def augmented(self, images: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Shift images, reflecting them at the border, and mirror them, by 31 bits for each."""
        count, height, width, _ = images.shape
        rows, ys, xs = (torch.arange(n, device=images.device) for n in (count, height, width))
        shifts = 2 * self.crop_padding + 1
        if self.flip:
            xs = torch.where((bits >> 30).bool()[:, None], width - 1 - xs, xs)
        ys = reflected(ys + (bits % shifts - self.crop_padding)[:, None], height)
        xs = reflected(xs + (bits // shifts % shifts - self.crop_padding)[:, None], width)
        return images[rows[:, None, None], ys[:, :, None], xs[:, None, :]]


class StreamedImages(ImageSamples):
    """One split, read from parquet files and decoded while training."""

    def __init__(
        self, rows: ParquetRows, source: DataSource, size: int, channels: int, *scaling: Any
    ) -> None:
        none = np.empty(0)
        super().__init__(none, none, *scaling)
        del self.arrays
        self.num_bytes, self.rows, self.blocks = None, rows, rows.blocks
        self.decode = functools.partial(
            pixels_of, source=source, split="train", size=size, channels=channels
        )

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        rows, labels = self.rows.read(samples, epoch)
        images = np.stack([*decoders(os.getpid()).map(self.decode, [image for (image,) in rows])])
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}


@functools.cache
def decoders(process: int) -> ThreadPoolExecutor:
    """Return this process's threads: a worker that was forked has none of its parent's."""
    return ThreadPoolExecutor(max(1, usable_cores() // local_world_size()))


@functools.cache  # to copy it from the host for each batch would be to wait for the device
def pixel_scaling(
    *mean_and_std: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what to subtract from pixels, and then to multiply them with, by channel."""
    mean, std = (torch.tensor(mean_and_std, dtype=torch.float64) * 255).chunk(2)
    return mean.to(dtype).to(device), std.reciprocal().to(dtype).to(device)


def reflected(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Fold positions just outside 0 … size - 1 back inside, as in a mirror at the border."""
    last = size - 1
    return last - (last - positions.abs()).abs()


@dataclass(kw_only=True)
class ImageData(Data):
    """An image classification data set, ready to train on."""

    splits: dict[str, ImageSamples]
    class_names: list[str]
    source: DataSource
    channels: int  # 1 or 3
    image_size: int  # height and width, in pixels
    mean: list[float]  # by channel, of pixels scaled to 0 … 1, over the training split
    std: list[float]

    def preprocessing(self) -> dict[str, Any]:
        names = ("class_names", "channels", "image_size", "mean", "std")
        return {name: getattr(self, name) for name in names}


def load_images(
    source: DataSource,
    *,
    image_size: int | None,
    image_column: str | None,
    label_column: str | None,
    dtype: torch.dtype,
    init_from: str | None = None,
) -> ImageData:
    """Return an image data set with batches in `dtype`, decoding it where no cache of it exists.

    `image_size` is the height and width to resize to; None for that of the data, 224 at most. The
    images are scaled as those were that the weights of `init_from` saw, and published weights say
    their size, too.
    """
    initial = initial_facts(init_from)
    image_size = image_size or initial.get("published_size")
    if source.location == "synthetic":
        facts, arrays = synthetic_images(image_size or LARGEST_DEFAULT_SIZE)
    else:
        columns = {"image_column": image_column, "label_column": label_column}
        names, settings = ("images", "labels"), {"size": image_size, **columns}
        if source.streaming:
            _, facts, arrays = cached(source, index_images, "rows-1", ("groups",), settings)
        else:
            _, facts, arrays = cached(source, decode_images, "images-8", names, settings)
    if {"mean", "std", "channels"} <= initial.keys():
        facts |= {name: initial[name] for name in ("mean", "std")}
        if (facts["channels"], initial["channels"]) == (1, 3):  # grey images, as colour
            facts["channels"] = 3
            for held in () if source.streaming else arrays.values():
                held[0] = np.broadcast_to(held[0], (*held[0].shape[:3], 3))
    scaling, splits = (facts["mean"], facts["std"], dtype), dict[str, ImageSamples]()
    index = Index(**facts.pop("index")) if source.streaming else None
    for name, held in arrays.items():
        if index is None:
            splits[name] = ImageSamples(held[0], held[1], *scaling)
        else:
            shape = facts["image_size"], facts["channels"]
            splits[name] = StreamedImages(ParquetRows(index, held[0]), source, *shape, *scaling)
    reads = READS | {"image_column"}
    return ImageData(name=source.name, source=source, splits=splits, reads=reads, **facts)


def synthetic_images(size: int) -> tuple[dict[str, Any], dict[str, list[np.ndarray]]]:
    """Return facts and splits of random colour images of any size, for speed alone."""
    random, arrays = np.random.default_rng(0), dict[str, list[np.ndarray]]()
    for split, count in (("train", 4096), ("validation", 512)):
        images = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        arrays[split] = [images, random.integers(0, 1000, count)]
    statistics = {"channels": 3, "image_size": size, "mean": [0.5] * 3, "std": [0.29] * 3}
    names, notes = [str(index) for index in range(1000)], ["random images: speed alone"]
    return statistics | {"class_names": names, "notes": notes}, arrays


def index_images(
    source: DataSource,
    folder: Path,
    size: int | None,
    image_column: str | None,
    label_column: str | None,
) -> dict[str, Any]:
    """Write where the row groups of all splits are; return facts, by some of the images."""
    import datasets

    train, index, groups = read_index(source, label_column)
    found = [name for name, kind in train.features.items() if isinstance(kind, datasets.Image)]
    index.columns = find_columns(train, source.name, "--image-column", image_column, found, found)
    for name, array in groups.items():
        write_array(folder / f"{name}_groups.npy", [array], len(array))
    looked_at = [value for (value,) in ParquetRows(index, groups["train"]).look(LOOKED_AT)]
    size, channels, _ = shape_of(looked_at, source, size)
    pixels = np.stack([pixels_of(value, source, "train", size, channels) for value in looked_at])
    counts = np.stack([np.bincount(c.ravel(), minlength=256) for c in np.moveaxis(pixels, 3, 0)])
    index.notes.append(f"image size and scaling by {len(looked_at):,} of the images")
    return {"channels": channels, "image_size": size} | scaling_by(counts) | index.facts(groups)


def shape_of(
    values: Iterable[dict[str, Any]], source: DataSource, size: int | None
) -> tuple[int, int, bool]:
    """Return the size and channels that images get, and whether all have this size."""
    shapes, modes = [], set()
    for value in values:
        with opened(value, source, "train") as image:
            shapes.append(image.size)
            modes.add(image.mode)
    channels = 1 if modes <= {"1", "L", "I", "I;16", "F"} else 3
    size = size or min(LARGEST_DEFAULT_SIZE, int(np.median([min(shape) for shape in shapes])))
    return size, channels, set(shapes) == {(size, size)}


def scaling_by(counts: np.ndarray) -> dict[str, list[float]]:
    """Return mean and deviation by channel; `counts` is [channels, 256], of pixels' values."""
    levels = np.broadcast_to(np.arange(256) / 255, counts.shape)
    mean = np.average(levels, axis=1, weights=counts)
    variance = np.average((levels - mean[:, None]) ** 2, axis=1, weights=counts)
    return {"mean": mean.tolist(), "std": np.sqrt(variance).clip(min=1 / 255).tolist()}


def decode_images(
    source: DataSource,
    folder: Path,
    size: int | None,
    image_column: str | None,
    label_column: str | None,
) -> dict[str, Any]:
    """Write all images as uint8 arrays of one size, and their labels; return facts."""
    import datasets

    raw = load_raw(source, label_column)
    train = raw.splits["train"]
    found = [name for name, kind in train.features.items() if isinstance(kind, datasets.Image)]
    (column,) = find_columns(train, raw.name, "--image-column", image_column, found, found)
    for name, split in [*raw.splits.items()]:
        raw.splits[name] = encoded = split.cast_column(column, datasets.Image(decode=False))
        held = enumerate(encoded[column])  # one after the other: all would fill the memory
        raw.keep(name, [row for row, v in held if v and {*v.values()} != {None}], "image")
    size, channels, alike = shape_of(raw.splits["train"][column], source, size)
    if not alike:
        raw.notes.append(f"images resized and centre-cropped to {size}×{size}")
    if (needed := len(raw) * size * size * channels) > shutil.disk_usage(folder).free:
        raise UserError(
            f"the decoded data take {needed / 2**30:.1f} GiB, which {folder.parent} has not: lower "
            "--image-size, or let XDG_CACHE_HOME name a folder on a larger disk"
        )
    say(f"decoding {len(raw):,} images once, for this and later runs")
    at_once = min(256, 1 + DECODED_BYTES // (size * size * channels))
    counts = np.zeros((channels, 256), dtype=np.int64)  # of the training pixels' values

    def decoded(name: str, split: "Dataset") -> Iterator[np.ndarray]:
        """Decode some images at a time, and count the values of training pixels."""
        decode = functools.partial(
            pixels_of, source=source, split=name, size=size, channels=channels
        )
        for rows in split.iter(at_once):
            images = np.stack([*pool.map(decode, rows[column])])
            for channel in range(channels if name == "train" else 0):
                counts[channel] += np.bincount(images[..., channel].ravel(), minlength=256)
            yield images

    with ThreadPoolExecutor() as pool:
        for name, split in raw.splits.items():
            write_array(folder / f"{name}_images.npy", decoded(name, split), len(split))
            write_array(folder / f"{name}_labels.npy", [raw.labels[name]], len(split))
    return {"channels": channels, "image_size": size} | scaling_by(counts) | raw.facts()


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


def pixels_of(
    value: dict[str, Any], source: DataSource, split: str, size: int, channels: int
) -> np.ndarray:
    with opened(value, source, split) as image:
        return image_to_pixels(image, size, channels)


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
