"""Images: decoded once, cached as uint8, memory-mapped; batches made on the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.cache import CachedData, prepare_once
from common.datasets import load_raw
from common.decode import LARGEST_DEFAULT_SIZE, decode_images
from common.loader import Batch
from common.sampling import random_bits
from common.sources import DataSource, cache_folder
from common.stopwatch import Work


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
        self.lengths_vary = False

    def __len__(self) -> int:
        return len(self.labels)

    def place(self, device: torch.device) -> None:
        """Copy all images and labels to `device`; on a CPU they stay memory-mapped."""
        self.placed_images = as_tensor(self.images).to(device)
        self.placed_labels = as_tensor(self.labels).to(device)

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch of `samples` from the device's memory: one indexed gather."""
        samples = samples.to(self.placed_labels.device, non_blocking=True)
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

    def count(self, samples: torch.Tensor) -> Work:
        """Return how many samples these are."""
        return Work(len(samples))

    def example(self, size: int, length: int) -> Batch:
        """Return a batch that has shapes only."""
        height, width, channels = self.images.shape[1:]
        images = torch.empty(size, channels, height, width, device="meta")
        return {"images": images, "labels": torch.empty(size, device="meta", dtype=torch.long)}

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
            return images.index_select(0, rows)
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
        shift, scale = pixel_scaling(*self.mean, *self.std, device=images.device, dtype=self.dtype)
        return values.sub_(shift).mul_(scale).permute(0, 3, 1, 2)


@functools.cache
def pixel_scaling(
    *mean_and_std: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what to subtract from pixels, and then to multiply them with, by channel.

    Made once: to copy it from the host for each batch would be to wait for the device each time.

    Args:
        mean_and_std: the means of all channels, then their deviations, of pixels in 0 … 1.
    """
    mean, std = (torch.tensor(mean_and_std, dtype=torch.float64) * 255).chunk(2)
    return mean.to(dtype).to(device), std.reciprocal().to(dtype).to(device)


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
    if source.location == "synthetic":
        return synthetic_images(source, image_size or LARGEST_DEFAULT_SIZE, seed, dtype)
    folder = cache_folder(
        source, kind="images-4", size=image_size, columns=[image_column, label_column]
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
