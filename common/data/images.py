"""Data sets of images: decoded once to uint8 and cached, or decoded while training."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.data.dataset import Data
from common.data.image_batches.image_samples import CachedImages, ImageSamples, StreamedImages
from common.data.image_decoding.image_files import Decoder
from common.data.image_decoding.image_format import MAX_DEFAULT_SIZE
from common.data.image_decoding.preparation import PATHS_SUFFIX, ImageFacts, prepare_images
from common.data.labelled_data.labels import LABELLED_DATA_FLAGS
from common.data.prepared_data.unseen_samples import prepared_samples
from common.data.sources import DataSource
from common.data.streaming.parquet_rows import ParquetRows
from common.errors import UserError
from common.run_directory.init_from import initial_facts
from common.run_directory.model_records import ImageFormat, InitialFacts, RequestedFormat

# This is part of a cache's name. With a new value, all caches are made again.
CACHE_VERSION = "images-11"
# The images and the labels of each split, or its row groups alone if the data set is streamed.
Arrays = dict[str, list[np.ndarray]]


@dataclass(kw_only=True)
class ImageData(Data):
    """An image classification data set, ready to train on."""

    splits: dict[str, ImageSamples]
    class_names: list[str]
    source: DataSource
    image_format: ImageFormat

    @property
    def channels(self) -> int:
        """The number of channels of each image, 1 or 3."""
        return self.image_format.channels

    @property
    def image_size(self) -> int:
        """The height and width of each image, in pixels."""
        return self.image_format.image_size

    def preprocessing(self) -> dict[str, object]:
        """Return the entries that a recipe adds to the description of its saved model.

        A saved model needs them to predict on new images. `ImageInput` parses them.
        """
        return {"class_names": self.class_names, **self.image_format.to_json()}

    def wants_flip(self, horizontal_flip: bool | None) -> bool:
        """Return whether training images are mirrored.

        Args:
            horizontal_flip: the value of `--horizontal-flip`; None: only images in colour, because
                a flip would spoil digits and letters.
        """
        return self.channels == 3 if horizontal_flip is None else horizontal_flip

    def allowed_shift(self, max_shift: int | None, default: int) -> int:
        """Return by how many pixels training images may be shifted.

        Args:
            max_shift: the value of `--max-shift`; None: the default.

        Raises:
            UserError: reflection at the border can't fill images that are shifted so far.
        """
        if max_shift is None:
            return default
        if max_shift >= self.image_size:
            raise UserError(
                f"--max-shift {max_shift} is too large for images of {self.image_size} × "
                f"{self.image_size} pixels",
                advice=f"pass {self.image_size - 1} or less",
            )
        return max_shift


def load_images(
    source: DataSource,
    *,
    image_size: int | None,
    image_column: str | None,
    label_column: str | None,
    dtype: torch.dtype,
    init_from: str | None = None,
) -> ImageData:
    """Load an image data set.

    Its images come decoded from the cache, and are decoded into it first if they are not there.
    With `--streaming`, they are decoded when a batch needs them.

    Args:
        image_size: height and width of all images, in pixels; None: as published weights of
            `--init-from` or the model of `--evaluate-only` were trained, or else as the data's
            images, 224 at most.
        image_column, label_column: the flags of these names; None: the column is inferred.
        dtype: the dtype of the images in a batch.
        init_from: the weights with which training begins; images are scaled as they expect it.

    Raises:
        UserError: the data or the facts about the weights can't be read.
    """
    initial = initial_facts(init_from)
    size = image_size or initial.published_size or format_of_evaluated(source).image_size
    folder, facts, arrays = prepared_images(source, size, image_column, label_column)
    image_format = format_of_batches(facts, initial, init_from)
    return ImageData(
        name=source.name,
        splits=image_splits(source, folder, facts, arrays, image_format, dtype),
        source=source,
        reads=LABELLED_DATA_FLAGS | {"image_column"},
        notes=facts["notes"],
        class_names=facts["class_names"],
        fingerprint=facts.get("fingerprint"),
        image_format=image_format,
        is_evaluated_only="train" not in arrays,
    )


def format_of_evaluated(source: DataSource) -> RequestedFormat:
    """Return the format that the evaluated model requires; all values are None without a model."""
    return RequestedFormat() if source.evaluated is None else source.evaluated.requested_format


def prepared_images(
    source: DataSource, size: int | None, image_column: str | None, label_column: str | None
) -> tuple[Path | None, ImageFacts, Arrays]:
    """Return the cache folder of a data set (None if synthetic), its facts and its arrays.

    If the data are not in the cache, they are prepared first.

    Args:
        size: height and width, in pixels; None: the images determine it.
    """
    if source.location == "synthetic":
        facts, arrays = synthetic_images(size or MAX_DEFAULT_SIZE)
        return None, facts, arrays
    settings = {"size": size, "image_column": image_column, "label_column": label_column}
    # `settings` has the size already: the model's, unless the user has set `--image-size`.
    requested = format_of_evaluated(source)
    evaluation_settings = {"channels": requested.channels, "white_level": requested.white_level}
    return prepared_samples(
        source,
        prepare_images,
        CACHE_VERSION,
        ("images", "labels"),
        settings,
        # The name of the cache depends on all settings, so those without a value are left out.
        {name: value for name, value in evaluation_settings.items() if value is not None},
    )


def format_of_batches(
    facts: ImageFacts, initial: InitialFacts, init_from: str | None
) -> ImageFormat:
    """Return the format of a data set's images, with the scaling of the initial weights if known.

    The weights expect pixels scaled as in their own training. If they take colours and the images
    are grey, the images get three channels.

    Args:
        facts: the facts about the data set, which have the scaling measured on it.
        initial: what `initial_facts` knows about the weights.
        init_from: the value of `--init-from`, for a message.

    Raises:
        UserError: see `initial_scaling`.
    """
    own_format = ImageFormat.model_validate(facts)
    if not initial.has_scaling:
        return own_format
    mean, std = initial_scaling(initial, init_from)
    becomes_coloured = own_format.channels == 1 and initial.channels == 3
    return ImageFormat(
        channels=3 if becomes_coloured else own_format.channels,
        image_size=own_format.image_size,
        white_level=own_format.white_level,
        mean=mean,
        std=std,
    )


def initial_scaling(
    initial: InitialFacts, init_from: str | None
) -> tuple[list[float], list[float]]:
    """Return the mean and std with which initial weights were trained.

    Raises:
        UserError: either is not one finite number for each channel, or an std is not positive.
    """
    advice = "pass the safetensors file of this model, instead of its folder or its id"
    wrong_count = UserError(
        f"--init-from {init_from} does not state one mean and one std of the pixels for each of "
        f"its channels ({initial.channels!r:.50})",
        advice=advice,
    )
    # A user's copy of a recipe may state anything under these names.
    if not isinstance(initial.channels, int) or initial.channels < 1:
        raise wrong_count
    try:
        scaling = np.array([initial.mean, initial.std], dtype=float)
        mean, std = scaling.reshape(2, initial.channels)
    except (TypeError, ValueError, OverflowError):
        raise wrong_count from None
    if not np.isfinite(scaling).all() or (std <= 0).any():
        raise UserError(
            f"--init-from {init_from} states a mean or an std of the pixels that is not finite, or "
            "an std that is not positive",
            advice=advice,
        )
    return mean.tolist(), std.tolist()


def image_splits(
    source: DataSource,
    folder: Path | None,
    facts: ImageFacts,
    arrays: Arrays,
    image_format: ImageFormat,
    dtype: torch.dtype,
) -> dict[str, ImageSamples]:
    """Return the samples of each split, streamed or from the cache.

    They are streamed if the facts have an index, which says how to read the parquet files.

    Args:
        folder: the folder of the cache; None: the images are synthetic, and have no paths.
    """
    index = facts.get("index")
    splits: dict[str, ImageSamples] = {}
    for name, split_arrays in arrays.items():
        if index is None:
            images, labels = split_arrays
            images = repeat_grey(images, image_format.channels)
            splits[name] = CachedImages(images, labels, image_format, dtype)
        else:
            (groups,) = split_arrays
            rows = ParquetRows(groups, **index)
            decode = Decoder(source, name, image_format)
            splits[name] = StreamedImages(rows, decode, image_format, dtype)
        if folder is not None:
            splits[name].paths_file = folder / f"{name}{PATHS_SUFFIX}"
    return splits


def repeat_grey(images: np.ndarray, channels: int) -> np.ndarray:
    """Give grey images all channels that the model takes, without a copy of the pixels.

    Args:
        images: uint8 [samples, height, width, 1]; or images with all channels, which stay as they
            are.
    """
    if images.shape[-1] == channels:
        return images
    return np.broadcast_to(images, (*images.shape[:3], channels))


def synthetic_images(size: int) -> tuple[ImageFacts, Arrays]:
    """Return facts and splits of random colour images, to measure speed only.

    The images have `size` × `size` pixels, and 1000 classes, as in ImageNet.
    """
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for split, count in (("train", 4096), ("validation", 512)):
        images = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        labels = random.integers(0, 1000, count)
        arrays[split] = [images, labels]
    facts: ImageFacts = {
        "channels": 3,
        "held_out": 0,
        "white_level": None,
        "image_size": size,
        # The mean and deviation of uniform noise from 0 to 1.
        "mean": [0.5] * 3,
        "std": [0.29] * 3,
        "class_names": [str(number) for number in range(1000)],
        "notes": ["random images, for measuring speed only"],
    }
    return facts, arrays
