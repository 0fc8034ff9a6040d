"""Opens and decodes the encoded images of a data set, and names them in messages."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from PIL import Image

from common.data.image_decoding.pixels import image_to_pixels
from common.data.sources import DataSource
from common.errors import UserError
from common.failures.sentences import reading
from common.run_directory.model_records import PixelFormat


class EncodedImage(TypedDict):
    """An image as `datasets` gives it undecoded: the contents of a file, or a path to it."""

    path: str | None
    bytes: bytes | None


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
