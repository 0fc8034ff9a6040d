"""Images: decoded once to uint8, cached, memory-mapped; batches made on the device."""

import functools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.batch import Batch, Data, TensorSamples
from common.data.decoding import LARGEST_DEFAULT_SIZE, NAMES_FILE, Decoder, prepare_images
from common.data.labels import READS
from common.data.order import random_bits
from common.data.parquet import ParquetRows
from common.data.prepared import prepared
from common.data.sources import DataSource
from common.devices import to_device
from common.files import reading
from common.initial import initial_facts
from common.machine import local_world_size, usable_cores


class ImageSamples(TensorSamples):
    """One split: uint8 images [samples, height, width, channels] and int64 labels [samples]."""

    crop_padding = 0  # pixels by which a training image is shifted at most
    flip = False  # whether half of the training images are mirrored
    names_file: Path | None = None  # JSON with the images' paths, where they are known

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

    @property
    def files(self) -> list[str] | None:
        """The images' paths within the data set, in their order; None if they are not known."""
        if self.names_file is None or not self.names_file.is_file():
            return None
        return json.loads(self.names_file.read_text(encoding="utf-8"))

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Augment the images of a training batch, and scale pixels to mean 0 and deviation 1."""
        images = batch["images"]
        if epoch is not None and (self.crop_padding or self.flip):
            bits = random_bits(self.seed, epoch, samples)
            images = self.augmented(images, to_device(bits, images.device))
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

    num_bytes = None

    def __init__(self, decode: Decoder, rows: ParquetRows, *scaling: Any) -> None:
        self.rows, self.blocks, self.decode = rows, rows.blocks, decode
        self.mean, self.std, self.dtype = scaling

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
    white_level: int | None = None  # in images of more than 8 bits a channel; None: none has

    def preprocessing(self) -> dict[str, Any]:
        names = ("class_names", "channels", "image_size", "mean", "std", "white_level")
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
    size = image_size or initial.get("published_size")
    for_model = {} if source.evaluated is None else dict(source.evaluated.preprocessing)
    size = size or for_model.pop("image_size", None)
    folder: Path | None = None
    if source.location == "synthetic":
        facts, arrays = synthetic_images(size or LARGEST_DEFAULT_SIZE)
    else:
        settings = {"size": size, "image_column": image_column, "label_column": label_column}
        names = ("images", "labels")
        for_model.pop("image_size", None)
        version = "images-10"
        folder, facts, arrays = prepared(
            source, prepare_images, version, names, settings, for_model
        )
    make: Callable[..., ImageSamples] = ImageSamples
    index = facts.pop("index", None)
    if {"mean", "std", "channels"} <= initial.keys():
        with reading(f"--init-from {init_from}: its mean and std"):
            both = np.array([initial[name] for name in ("mean", "std")], dtype=float)
            if (both.reshape(2, initial["channels"])[1] <= 0).any():
                raise ValueError("a deviation of 0")
        facts |= {name: initial[name] for name in ("mean", "std")}
        if (facts["channels"], initial["channels"]) == (1, 3):  # grey images, as colour
            facts["channels"] = 3
            for one in arrays.values() if index is None else ():
                one[0] = np.broadcast_to(one[0], (*one[0].shape[:3], 3))
    if index is not None:
        arrays = {name: [ParquetRows(groups, **index)] for name, (groups,) in arrays.items()}
        shape = facts["image_size"], facts["channels"], facts["white_level"]
        decode = Decoder(source, "train", *shape)
        make = functools.partial(StreamedImages, decode)
    scaling = facts["mean"], facts["std"], dtype
    splits = {name: make(*one, *scaling) for name, one in arrays.items()}
    if folder is not None:
        for name, split in splits.items():
            split.names_file = folder / f"{name}{NAMES_FILE}"
    reads = READS | {"image_column"}
    facts |= {"name": source.name, "source": source, "reads": reads}
    return ImageData(splits=splits, is_evaluated_only="train" not in splits, **facts)


def synthetic_images(size: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return facts and splits of random colour images of any size, for speed alone."""
    random, arrays = np.random.default_rng(0), dict[str, list[Any]]()
    for split, count in (("train", 4096), ("validation", 512)):
        images = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        arrays[split] = [images, random.integers(0, 1000, count)]
    statistics = {"channels": 3, "image_size": size, "mean": [0.5] * 3, "std": [0.29] * 3}
    names, notes = [str(index) for index in range(1000)], ["random images: speed alone"]
    return statistics | {"class_names": names, "notes": notes}, arrays
