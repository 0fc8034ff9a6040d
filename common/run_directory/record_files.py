"""Reads JSON files as records, strictly; the error for a damaged file says which entry is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from common.errors import UserError
from common.storage.json_files import PUT_BACK, json_safe, read_json_if_there
from common.system.wording import shortened


class Record(BaseModel):
    """A part of a file. Values must have the stated types: the text "3" is not the integer 3.

    Unless a subclass ignores unknown keys, they are kept: a newer version of the library may have
    written the file.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="allow",
        # A field may have an alias, which is its key in the file. Code may use either.
        validate_by_name=True,
        validate_by_alias=True,
    )

    def to_json(self) -> dict[str, JsonValue]:
        """Return the record as JSON, without the fields that were not set.

        So a record that was read from a file gets no further entries when it is written again.
        """
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


AnyRecord = TypeVar("AnyRecord", bound=Record)


MAX_CHARACTERS = 60  # characters of a wrong value that a sentence repeats


def read_record(path: Path, record_class: type[AnyRecord], advice: str = PUT_BACK) -> AnyRecord:
    """Return the record in a JSON file.

    Args:
        advice: what to do if the file is missing or damaged.

    Raises:
        UserError: the file is missing or can't be read, or its contents do not have the record's
            structure.
    """
    record = read_record_if_there(path, record_class, advice)
    if record is None:
        raise UserError(f"{path} does not exist", advice=advice)
    return record


def read_record_if_there(
    path: Path, record_class: type[AnyRecord], advice: str = PUT_BACK
) -> AnyRecord | None:
    """Return the record in a JSON file; None if there is no such file.

    Args:
        advice: what to do if the file is damaged.

    Raises:
        UserError: the file can't be read, or its contents do not have the record's structure.
    """
    contents = read_json_if_there(path, advice)
    return None if contents is None else parse_record(contents, record_class, str(path), advice)


def parse_record(
    contents: Mapping[str, object],
    record_class: type[AnyRecord],
    source: str,
    advice: str = PUT_BACK,
) -> AnyRecord:
    """Return a record from the contents of a JSON file.

    Args:
        source: the file's path or address, for a message.
        advice: what to do if the contents are damaged.

    Raises:
        UserError: a key is missing, or its value has another type.
    """
    try:
        return record_class.model_validate(json_safe(contents))
    except ValidationError as problem:
        mistake = mistake_in_words(problem.errors()[0])
        raise damaged_record_error(source, mistake, advice) from None


def damaged_record_error(source: str, mistake: str, advice: str = PUT_BACK) -> UserError:
    """Return the error for a file with a wrong entry; see `parse_record`.

    Args:
        mistake: the wrong entry, in words.
    """
    return UserError(f"{source} is damaged or was edited ({mistake})", advice=advice)


def mistake_in_words(error: ErrorDetails) -> str:
    """Return one of pydantic's errors as a clause without a full stop."""
    place = ".".join(str(name) for name in error["loc"])
    if error["type"] == "missing":
        return f"{place} is missing"
    value = shortened(repr(error["input"]), MAX_CHARACTERS)
    # After these words comes the parser's reason, which tells a user nothing new.
    message = error["msg"].partition(", unable to parse")[0]
    expected = message.removeprefix("Input should be ")
    if expected == message:  # a whole sentence, such as one on the length of a list
        return f"{place} is {value}: {message}"
    return f"{place} is {value}, but should be {expected}"
