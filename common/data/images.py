"""Images: decoded once to uint8, cached, memory-mapped; batches made on the device."""

import functools
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps

from common.console import say
from common.data.batch import Batch, Data, TensorSamples
from common.data.order import random_bits
from common.data.sources import DataSource, cache_folder, cached, prepare_once
from common.data.tables import READS, RawData, existing_column, load_raw
from common.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

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
        self.images, self.labels = images, labels
        self.mean, self.std, self.dtype = mean, std, dtype
        self.crop_padding = 0  # pixels by which a training image is shifted at most
        self.flip = False  # whether half of the training images are mirrored

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        samples = samples.to(self.device, non_blocking=True)
        return self.taken(self.placed, samples, samples, epoch)

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        rows = torch.arange(len(samples), device=samples.device)
        return self.taken(batch, rows, samples, epoch)

    def taken(
        self, arrays: Batch, rows: torch.Tensor, samples: torch.Tensor, epoch: int | None
    ) -> Batch:
        """Take `rows` of `arrays`, `samples` of the split, with pixels of mean 0, deviation 1."""
        images = self.augmented(arrays["images"], rows, samples, epoch).to(self.dtype)
        shift, scale = pixel_scaling(*self.mean, *self.std, device=images.device, dtype=self.dtype)
        images = images.sub_(shift).mul_(scale).permute(0, 3, 1, 2)
        return {"images": images, "labels": arrays["labels"][rows]}

    def augmented(
        self, images: torch.Tensor, rows: torch.Tensor, samples: torch.Tensor, epoch: int | None
    ) -> torch.Tensor:
        """Take `rows` of `images`, each shifted (and reflected at its border) and mirrored."""
        if epoch is None or not (self.crop_padding or self.flip):
            return images.index_select(0, rows)
        height, width = images.shape[1:3]
        bits = random_bits(self.seed, epoch, samples)
        shifts = 2 * self.crop_padding + 1
        ys = torch.arange(height, device=rows.device) + (bits % shifts - self.crop_padding)[:, None]
        xs = torch.arange(width, device=rows.device)
        if self.flip:
            xs = torch.where((bits >> 30).bool()[:, None], width - 1 - xs, xs)
        xs = xs + (bits // shifts % shifts - self.crop_padding)[:, None]
        ys, xs = reflected(ys, height), reflected(xs, width)
        return images[rows[:, None, None], ys[:, :, None], xs[:, None, :]]

    def example(self, size: int, length: int) -> Batch:
        height, width, channels = self.images.shape[1:]
        images = torch.empty(size, channels, height, width, device="meta")
        return {"images": images, "labels": torch.empty(size, device="meta", dtype=torch.long)}


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
) -> ImageData:
    """Return an image data set with batches in `dtype`, decoding it where no cache of it exists.

    `image_size` is the height and width to resize to; None for that of the data, 224 at most.
    """
    if source.location == "synthetic":
        facts, arrays = synthetic_images(image_size or LARGEST_DEFAULT_SIZE)
    else:

        def prepare(target: Path) -> dict[str, Any]:
            return decode_images(target, load_raw(source, label_column), image_size, image_column)

        columns = [image_column, label_column]
        folder = cache_folder(source, kind="images-6", size=image_size, columns=columns)
        facts = prepare_once(folder, prepare)
        arrays = {name: cached(folder, name, "images", "labels") for name in facts.pop("splits")}
    splits = {
        name: ImageSamples(images, labels, facts["mean"], facts["std"], dtype)
        for name, (images, labels) in arrays.items()
    }
    reads = READS | {"image_column"}
    return ImageData(name=source.name, source=source, splits=splits, reads=reads, **facts)


def synthetic_images(size: int) -> tuple[dict[str, Any], dict[str, list[np.ndarray]]]:
    """Return facts and splits of random colour images of any size, for speed alone."""
    random, names = np.random.default_rng(0), [str(index) for index in range(1000)]
    arrays: dict[str, list[np.ndarray]] = {
        split: [
            random.integers(0, 256, (count, size, size, 3), dtype=np.uint8),
            random.integers(0, len(names), count),
        ]
        for split, count in (("train", 4096), ("validation", 512))
    }
    return {
        "channels": 3,
        "image_size": size,
        "mean": [0.5] * 3,
        "std": [0.29] * 3,
        "class_names": names,
        "notes": ["random images: speed alone"],
    }, arrays


def decode_images(
    folder: Path, raw: RawData, size: int | None, column: str | None
) -> dict[str, Any]:
    """Write all images of `raw` as uint8 arrays of one size, and their labels; return facts."""
    import datasets

    column = find_image_column(raw.splits["train"], column, raw.name)
    for name, split in raw.splits.items():
        raw.splits[name] = encoded = split.cast_column(column, datasets.Image(decode=False))
        raw.keep(name, [r for r, v in enumerate(encoded[column]) if v is not None], "an image")
    shapes, modes = [], set()
    for value in raw.splits["train"][column]:
        with opened(value, f"one of split train of {raw.name}") as image:
            shapes.append(image.size)
            modes.add(image.mode)
    channels = 1 if modes <= {"1", "L", "I", "I;16", "F"} else 3
    size = size or min(LARGEST_DEFAULT_SIZE, int(np.median([min(shape) for shape in shapes])))
    if set(shapes) != {(size, size)}:
        raw.notes.append(f"images resized and centre-cropped to {size}×{size}")
    total, free = sum(map(len, raw.splits.values())), shutil.disk_usage(folder).free
    needed = total * size * size * channels
    if needed > 0.9 * free:
        raise UserError(
            f"the decoded data take {needed / 2**30:.1f} GiB, and {folder.parent} has "
            f"{free / 2**30:.1f} GiB free: lower --image-size, or let XDG_CACHE_HOME name a "
            "folder on a larger disk"
        )
    say(f"decoding {total:,} images once, for this and later runs")
    counts = np.zeros((channels, 256), dtype=np.int64)  # of the training pixels' values
    for name, split in raw.splits.items():
        images = np.lib.format.open_memmap(
            folder / f"{name}_images.npy", "w+", np.uint8, (len(split), size, size, channels)
        )
        where = f"one of split {name} of {raw.name}"
        decode = functools.partial(pixels_of, size=size, channels=channels, where=where)
        with ThreadPoolExecutor() as pool:
            for start, rows in zip(range(0, len(split), 256), split.iter(256), strict=True):
                decoded = np.stack(list(pool.map(decode, rows[column])))
                images[start : start + 256] = decoded
                for channel in range(channels if name == "train" else 0):
                    counts[channel] += np.bincount(decoded[..., channel].ravel(), minlength=256)
        np.save(folder / f"{name}_labels.npy", raw.labels[name])
    levels = np.broadcast_to(np.arange(256) / 255, counts.shape)
    mean = np.average(levels, axis=1, weights=counts)
    variance = np.average((levels - mean[:, None]) ** 2, axis=1, weights=counts)
    std = np.sqrt(variance).clip(min=1 / 255)
    statistics = {"mean": mean.tolist(), "std": std.tolist()}
    return {"channels": channels, "image_size": size} | statistics | raw.facts()


def find_image_column(split: "Dataset", asked: str | None, name: str) -> str:
    from datasets import Image

    if asked is not None:
        existing_column(split, asked, "--image-column", name)
    images = [column for column, kind in split.features.items() if isinstance(kind, Image)]
    columns = [column for column in images if asked in (None, column)]
    if len(columns) != 1:
        found = ", ".join(f"{c} ({type(k).__name__})" for c, k in split.features.items())
        what = "several columns of images: name one with --image-column" if columns else "no images"
        raise UserError(f"data set {name} has {what}; its columns: {found}")
    return columns[0]


@contextmanager
def opened(value: dict[str, Any], where: str) -> Iterator[Image.Image]:
    """Open one encoded image, whose pixels are read later; `where` names it if it has no path."""
    try:
        yield Image.open(value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"]))
    except (OSError, SyntaxError) as problem:
        where = value["path"] or where
        raise UserError(f"image {where} can't be decoded ({problem}): mend or remove it") from None


def pixels_of(value: dict[str, Any], size: int, channels: int, where: str) -> np.ndarray:
    with opened(value, where) as image:
        return image_to_pixels(image, size, channels)


def image_to_pixels(image: Image.Image, size: int, channels: int) -> np.ndarray:
    """Return an image as uint8 [size, size, channels], resized and centre-cropped."""
    if image.mode.startswith("I"):  # of 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels)
