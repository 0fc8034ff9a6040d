"""Defines excerpts: the values that tolerant readers take from a JSON file of a run.

Some files are edited, or written by hand. An excerpt accepts any JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from common.run_directory.record_files import Record
from common.storage.json_files import JsonObject


def none_if_invalid(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return a value of an excerpt, or None if its type is not the one that the excerpt states."""
    try:
        return validate(value)
    except ValidationError:
        return None


Value = TypeVar("Value")
Lenient = Annotated[Value | None, WrapValidator(none_if_invalid)]


class DataExcerpt(Record, extra="ignore"):
    """The values that tolerant readers take from the entry `data` of a `config.json`."""

    fingerprint: Lenient[str] = None
    sizes: Lenient[dict[str, int]] = None  # samples by split


class Excerpt(Record, extra="ignore"):
    """The values that tolerant readers take from `config.json`, `status.json` or a manifest.

    No value is required, and a value of another type counts as missing. For example, `--config`
    accepts a file that has only flags, and an edited file must still be recognised.
    """

    run_id: object = None  # a text, unless the file was edited
    recipe: object = None  # a text, unless the file was edited
    # Values of flags are not validated: the type of a flag is in the recipe's `Config`.
    config_flags: Lenient[JsonObject] = Field(None, validation_alias="config")  # in `config.json`
    manifest_flags: Lenient[JsonObject] = Field(None, validation_alias="flags")  # in a manifest
    data: Lenient[DataExcerpt] = None


def excerpt_of(contents: Mapping[str, object]) -> Excerpt:
    """Return the excerpt of a file's contents, which may be any JSON object."""
    return Excerpt.model_validate(dict(contents))
