"""Defines records of `model.json`, and of the other files that describe the weights of a model."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, JsonValue

from common.run_directory.record_files import Record

Side = Annotated[int, Field(ge=1, le=2**16)]  # of an image; a larger number is a sign of damage
FULL_SCALE = 65535  # the largest value of 16 bits: white for a model that states no white level


class WeightsDigest(Record):
    """The entry of `model.json` by which readers notice that the weights beside it have changed.

    The digest is None if a user wrote the file, or removed the digest to change the weights.
    """

    weights_sha256: str | None = None


class ModelFacts(WeightsDigest):
    """`model.json`: how to build a finished model.

    The file also has all further facts that the recipe stated about its model in `run.start`.
    Classifiers state those of `ImageInput` or `TextInput`.
    """

    recipe: str | None = None
    # The file has the key "class", which can't be the name of an attribute.
    class_name: str | None = Field(None, validation_alias="class", serialization_alias="class")
    update: int | None = None  # the update after which the model has these weights
    run_id: str | None = None
    arguments: dict[str, JsonValue] | None = None  # the class's arguments; None: not stated

    @property
    def takes_images(self) -> bool:
        """Whether the model classifies images; only such models state a mean of the pixels."""
        return {"class_names", "mean"} <= self.model_fields_set

    @property
    def takes_texts(self) -> bool:
        """Whether the model classifies texts; only such models state a largest length."""
        return {"class_names", "max_length"} <= self.model_fields_set


class PixelFormat(Record, extra="ignore"):
    """The pixels to which images are decoded: uint8 [image_size, image_size, channels]."""

    channels: int  # 1 or 3
    image_size: int  # height and width
    # The value that becomes 255, in images of more than 8 bits a channel; None: no such images.
    white_level: int | None = None


class RequestedFormat(NamedTuple):
    """The parts of a `PixelFormat` that the user or a model requires.

    None: the images determine the part.
    """

    image_size: int | None = None
    channels: int | None = None
    white_level: int | None = None


class ImageFormat(PixelFormat):
    """The images that a model takes: their pixels, and how a batch scales these.

    Its fields are entries of `model.json` and of the facts in the cache of prepared data.
    """

    # The mean and the standard deviation of each channel, of pixels scaled to 0 … 1.
    mean: list[float]
    std: list[float]


class ImageInput(ImageFormat):
    """The input of a classifier of images; a part of `model.json`."""

    class_names: list[object]  # texts, unless a user's copy of a recipe states numbers


class TextInput(Record, extra="ignore"):
    """The input of a classifier of texts; a part of `model.json`."""

    class_names: list[object]  # texts, unless a user's copy of a recipe states numbers
    text_columns: list[str]
    max_length: int  # the number of tokens after which a text is cut


class InitialFacts(Record, extra="ignore"):
    """The known facts about the weights of `--init-from`; a part of a run's `model.json`.

    A user's copy of a recipe may use these names for other facts. So the values may have any type,
    and the code that uses a value checks it.
    """

    update: object = None  # the update after which the model had these weights
    run_id: object = None
    class_names: object = None
    channels: object = None
    image_size: object = None
    white_level: object = None
    mean: object = None
    std: object = None
    published_size: int | None = None  # size of the images that published weights had, in pixels

    @property
    def has_scaling(self) -> bool:
        """Whether the facts state how images were scaled."""
        return {"mean", "std", "channels"} <= self.model_fields_set


class PublishedSettings(Record, extra="ignore"):
    """The images on which published weights were trained; a part of timm's `config.json`."""

    input_size: list[Side] = Field(min_length=3, max_length=3)  # channels, height, width
    mean: list[float]  # by channel
    std: list[float]
