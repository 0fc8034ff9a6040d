"""Images: decoded once, cached as uint8, memory-mapped; batches made on the device."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.cache import CachedData, prepare_once
from common.console import say
from common.datasets import DataSource, RawData, cache_folder, existing_column, load_raw
from common.errors import UserError
from common.loader import Batch
from common.sampling import random_bits

if TYPE_CHECKING:
    from datasets import Dataset

LARGEST_DEFAULT_SIZE = 224  # pixels; larger images are resized unless --image-size says otherwise


@dataclass
class ImageData:
    """An image classification data set, ready to train on."""

    source: DataSource
    class_names: list[str]
    channels: int  # 1 or 3
    image_size: int  # height and width, in pixels
    mean: list[float]  # by channel, of pixels scaled to 0 … 1, over the training split
    std: list[float]
    splits: dict[str, ImageSamples]
    notes: list[str]

    def preprocessing(self) -> dict[str, Any]:
        """Return what `common.export.ImagePreprocessor` needs."""
        names = ("channels", "image_size", "mean", "std")
        return {name: getattr(self, name) for name in names}


class ImageSamples:
    """One split: uint8 images [samples, height, width, channels] and int64 labels [samples]."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: list[float],
        std: list[float],
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        self.images, self.labels = images, labels
        self.mean, self.std, self.seed = mean, std, seed
        self.dtype = dtype
        self.crop_padding = 0  # pixels by which a training image is shifted at most
        self.flip = False  # whether half of the training images are mirrored
        self.num_bytes = images.nbytes
        self.bytes_per_sample: int | None = images[0].nbytes

    def __len__(self) -> int:
        return len(self.labels)

    def place(self, device: torch.device) -> None:
        """Copy all images and labels to `device`; on a CPU they stay memory-mapped."""
        self.placed_images = as_tensor(self.images).to(device)
        self.placed_labels = as_tensor(self.labels).to(device)

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch of `samples` from the device's memory: one indexed gather."""
        images = self.augmented(self.placed_images, samples, samples, epoch)
        return {"images": self.normalized(images), "labels": self.placed_labels[samples]}

    def fetch(self, samples: torch.Tensor) -> Batch:
        """Read `samples` from the memory-mapped files, in a worker."""
        rows = samples.numpy()
        return {
            "images": torch.from_numpy(self.images[rows]),
            "labels": torch.from_numpy(self.labels[rows]),
        }

    def finish(self, raw: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Augment and normalise on the device what a worker fetched."""
        rows = torch.arange(len(samples), device=samples.device)
        images = self.augmented(raw["images"], rows, samples, epoch)
        return {"images": self.normalized(images), "labels": raw["labels"]}

    def count_tokens(self, samples: torch.Tensor) -> int:
        """Images have no tokens."""
        return 0

    def augmented(
        self, images: torch.Tensor, rows: torch.Tensor, samples: torch.Tensor, epoch: int | None
    ) -> torch.Tensor:
        """Take `rows` of `images`, each shifted and mirrored at random while training.

        The shift reflects the image at its border. What is drawn depends on seed, epoch and
        sample index alone, never on how the epoch is cut into batches.

        Args:
            images: uint8 [images, height, width, channels].
            rows: int64 [batch], into `images`.
            samples: int64 [batch], the same images' numbers in the split.
        Returns:
            uint8 [batch, height, width, channels].
        """
        if epoch is None or not (self.crop_padding or self.flip):
            return images[rows]
        height, width = images.shape[1:3]
        bits = random_bits(self.seed, epoch, samples)
        shifts = 2 * self.crop_padding + 1
        ys = torch.arange(height, device=rows.device) + (bits % shifts - self.crop_padding)[:, None]
        xs = torch.arange(width, device=rows.device)
        if self.flip:
            mirrored = (bits >> 30).bool()[:, None]
            xs = torch.where(mirrored, width - 1 - xs, xs)
        xs = xs + (bits // shifts % shifts - self.crop_padding)[:, None]
        ys, xs = reflected(ys, height), reflected(xs, width)
        return images[rows[:, None, None], ys[:, :, None], xs[:, None, :]]

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Return [batch, channels, height, width] of mean 0 and deviation 1, channels last."""
        values = images.to(self.dtype)
        mean = values.new_tensor([255 * mean for mean in self.mean])
        scale = values.new_tensor([1 / (255 * std) for std in self.std])
        return values.sub_(mean).mul_(scale).permute(0, 3, 1, 2)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Wrap a read-only array without a copy: nothing writes to a data set's tensors."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def reflected(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Fold positions just outside 0 … size - 1 back inside, as in a mirror at the border."""
    last = size - 1
    return last - (last - positions.abs()).abs()


def load_images(
    source: DataSource,
    *,
    image_size: int | None,
    image_column: str | None,
    label_column: str | None,
    seed: int,
    dtype: torch.dtype,
) -> ImageData:
    """Return an image data set, decoding it first where no cache of it exists.

    Args:
        image_size: height and width to resize to; None for that of the data, 224 at most.
        seed: of augmentation.
        dtype: of the batches: the one that the model computes in.

    Raises:
        UserError: for data that can't be read or used.
    """
    if source.name == "synthetic":
        return synthetic_images(source, image_size or LARGEST_DEFAULT_SIZE, seed, dtype)
    folder = cache_folder(
        source, kind="images-1", size=image_size, columns=[image_column, label_column]
    )

    def prepare(target: CachedData) -> None:
        decode_images(target, load_raw(source, label_column), source, image_size, image_column)

    cached = prepare_once(folder, prepare)
    facts = cached.facts
    splits = {
        name: ImageSamples(
            cached.array(f"{name}_images"),
            cached.array(f"{name}_labels"),
            facts["mean"],
            facts["std"],
            seed,
            dtype,
        )
        for name in facts["splits"]
    }
    keys = ("class_names", "channels", "image_size", "mean", "std", "notes")
    return ImageData(source=source, splits=splits, **{key: facts[key] for key in keys})


def synthetic_images(
    source: DataSource, size: int, seed: int, dtype: torch.dtype, classes: int = 1000
) -> ImageData:
    """Return random colour images of any size, for speed alone."""
    random = np.random.default_rng(seed)
    mean, std = [0.5] * 3, [0.29] * 3
    splits = {}
    for name, count in (("train", 4096), ("validation", 512)):
        images = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        labels = random.integers(0, classes, count)
        splits[name] = ImageSamples(images, labels, mean, std, seed, dtype)
    names = [str(index) for index in range(classes)]
    return ImageData(source, names, 3, size, mean, std, splits, ["random images: speed alone"])


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
    for name, split in encoded.items():
        images = target.create(f"{name}_images", np.uint8, (len(split), size, size, channels))
        decode = partial(to_pixels, size=size, channels=channels, source=source, split=name)
        position = 0
        with ThreadPoolExecutor() as pool:
            for rows in split.iter(1024):
                for pixels in pool.map(decode, rows[column]):
                    images[position] = pixels
                    position += 1
        target.save(f"{name}_labels", raw.labels[name])
    pixels = target.opened["train_images"].reshape(-1, channels)
    histogram = [np.bincount(pixels[:, channel], minlength=256) for channel in range(channels)]
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
        return Image.open(io.BytesIO(value["bytes"]) if value["bytes"] else value["path"])
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
