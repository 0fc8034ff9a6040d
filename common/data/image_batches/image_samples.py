"""Makes batches of the images of a split, which are in memory or decoded while training.

Augmentation and scaling of pixels take place on the device.
"""

import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.data.image_batches.shifts import shifted
from common.data.image_decoding.image_files import Decoder
from common.data.order import random_bits
from common.data.samples import Batch, Samples
from common.data.stored_samples import TensorSamples
from common.data.streaming.parquet_rows import ParquetRows
from common.run_directory.model_records import ImageFormat
from common.system.devices import to_device
from common.system.processor import cores_per_process

LOW_BITS = 2**30 - 1  # all but the highest of the 31 random bits of an image


class ImageSamples(Samples):
    """One split of images with labels, cached or streamed, which are augmented and scaled."""

    # A recipe sets the first two for the training split.
    max_shift = 0  # pixels by which a training image is shifted at most
    flip = False  # whether half of the training images are mirrored
    paths_file: Path | None = None  # JSON with the images' paths, if they are known

    def __init__(self, image_format: ImageFormat, dtype: torch.dtype) -> None:
        """Store what batches hold: images of this format and this dtype."""
        self.image_format = image_format
        self.dtype = dtype

    @property
    def files(self) -> list[str] | None:
        """The images' paths within the data set, in their order; None if they are not known.

        A tracker shows them beside images that the model takes for another class.
        """
        if self.paths_file is None or not self.paths_file.is_file():
            return None
        return json.loads(self.paths_file.read_text(encoding="utf-8"))

    def finish(self, batch: Batch, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Augment the images of a training batch, and scale the pixels of any batch.

        After the scaling, the pixels of a channel have a mean of about 0 and a standard deviation
        of about 1.

        Args:
            batch: images: uint8 [batch, height, width, channels]; labels: int64 [batch].
            indices: those of the samples, int64 [batch].
            epoch: the epoch, which augmentation depends on; None in an evaluation.

        Returns:
            images: `dtype` [batch, channels, height, width]; labels.
        """
        images = batch["images"]
        if epoch is not None and (self.max_shift or self.flip):
            bits = random_bits(self.seed, epoch, indices)
            if self.flip:
                # The highest bit mirrors the image. It alternates between epochs.
                bits = (bits & LOW_BITS) | (alternating_bits(self.seed, epoch, indices) << 30)
            images = self.augmented(images, to_device(bits, images.device))
        mean = tuple(self.image_format.mean)
        std = tuple(self.image_format.std)
        shift, scale = pixel_scaling(mean, std, images.device, self.dtype)
        images = images.to(self.dtype).sub_(shift).mul_(scale).permute(0, 3, 1, 2)
        return {"images": images, "labels": batch["labels"]}

    def first_images(self, count: int) -> torch.Tensor:
        """Return the first images as an evaluation sees them.

        They are scaled but not augmented. A recipe can compute the weights of a first layer from
        them.

        Args:
            count: the most images; a split may have fewer.

        Returns:
            `dtype` [images, channels, height, width].
        """
        indices = torch.arange(min(count, len(self)))
        return self.finish(self.fetch(indices, None), indices, None)["images"]

    def augmented(self, images: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Mirror and shift each image as its bits say; reflection at the border fills the gaps.

        Args:
            images: uint8 [batch, height, width, channels].
            bits: int64 [batch], 31 random bits for each image: the highest bit decides whether the
                image is mirrored, and the whole number chooses the shift.

        Returns:
            uint8, of the same shape.
        """
        shifts = 2 * self.max_shift + 1
        tops = bits % shifts
        lefts = bits // shifts % shifts
        is_mirrored = (bits >> 30).bool() if self.flip else None
        return shifted(images, tops, lefts, is_mirrored, self.max_shift)


class CachedImages(ImageSamples, TensorSamples):
    """One split of decoded images."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        image_format: ImageFormat,
        dtype: torch.dtype,
    ) -> None:
        """Store the images and labels of a split.

        Args:
            images: uint8 [samples, height, width, channels].
            labels: int64 [samples].
            image_format: the format of the images.
            dtype: the dtype of the images in a batch.
        """
        ImageSamples.__init__(self, image_format, dtype)
        TensorSamples.__init__(self, images=images, labels=labels)
        self.images = images
        self.labels = labels


class StreamedImages(ImageSamples):
    """One split of images, read from parquet files and decoded while training."""

    def __init__(
        self,
        rows: ParquetRows,
        decode: Decoder,
        image_format: ImageFormat,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(image_format, dtype)
        self.rows = rows
        self.blocks = rows.blocks
        self.decode = decode

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        rows, labels = self.rows.read(indices, epoch)
        encoded = [image for (image,) in rows]
        images = np.stack(list(decoding_threads(os.getpid()).map(self.decode, encoded)))
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}


def alternating_bits(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Return the bit of each sample that says whether it is mirrored in this epoch.

    The bit is random in the first epoch, and then changes from epoch to epoch. So an image is seen
    from both sides in any two epochs that follow each other. With a new random bit for each epoch,
    half of the images would show the same side again, and training would take longer
    (arXiv 2404.00498, section 3.6).

    Args:
        indices: those of the samples, int64 [batch].

    Returns:
        int64 [batch], 0 or 1.
    """
    return (random_bits(seed, 0, indices) >> 30) ^ (epoch & 1)


@functools.cache
def decoding_threads(process_id: int) -> ThreadPoolExecutor:
    """Return the threads of this process that decode images.

    The process id is part of the cache's key, because a forked worker inherits the cache but not
    the threads of its parent.
    """
    return ThreadPoolExecutor(cores_per_process())


@functools.cache  # without the cache, each batch would wait for a copy from the host
def pixel_scaling(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what scales uint8 pixels: a value to subtract first, and then a factor.

    Args:
        mean: the mean of each channel, of pixels scaled to 0 … 1.
        std: the standard deviation of each channel.

    Returns:
        Two tensors [channels], on `device`.
    """
    shift = torch.tensor(mean, dtype=torch.float64) * 255
    scale = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
    return shift.to(dtype).to(device), scale.to(dtype).to(device)
