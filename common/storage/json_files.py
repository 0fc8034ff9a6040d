"""Reads and writes JSON files. A file that can't be read gives a `UserError` with a sentence."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, overload

from common.errors import UserError
from common.failures.sentences import as_user_error
from common.storage.files import refuse_pipe, write_text

# The advice for a damaged or missing file.
PUT_BACK = "restore it from a backup, or start a new run"
# A JSON object as Python reads it. `json` does not say which types its values have, and each use
# needs others. `common.run_directory.records` has the types of the files in a run's directory.
JsonObject = dict[str, Any]
# NaN and infinities, which Python writes although JSON has no names for them, become None.
parse = partial(json.loads, parse_constant=lambda name: None)


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file, or replace it; NaN and infinities become null."""
    write_text(path, json.dumps(json_safe(value), indent=2) + "\n")


@overload
def json_safe(value: Mapping[str, object]) -> JsonObject: ...


@overload
def json_safe(value: object) -> object: ...


def json_safe(value: object) -> object:
    """Return a nested value as it would come back from a JSON file.

    NaN and infinities become None, mappings become dicts, and tuples become lists. Other values
    stay as they are.
    """
    if isinstance(value, Mapping):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    is_not_finite = isinstance(value, float) and not math.isfinite(value)
    return None if is_not_finite else value


def read_json(path: Path, advice: str = PUT_BACK) -> JsonObject:
    """Return the JSON object in a file.

    Args:
        advice: what to do if the file is missing or damaged.

    Raises:
        UserError: the file is missing, can't be read, or contains no JSON object.
    """
    value = read_json_if_there(path, advice)
    if value is None:
        raise UserError(f"{path} does not exist", advice=advice)
    return value


def read_json_if_there(path: Path, advice: str = PUT_BACK) -> JsonObject | None:
    """Return the JSON object in a file; None if there is no such file.

    Args:
        advice: what to do if the file is damaged.

    Raises:
        UserError: the file can't be read, or it contains no JSON object.
    """
    with reading_file_of_run(path, advice):
        try:
            value = parse(refuse_pipe(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
    if not isinstance(value, dict):
        problem = f"{path} is damaged or was edited, because it does not contain a JSON object"
        raise UserError(problem, advice=advice)
    return value


def reading_file_of_run(path: Path, advice: str = PUT_BACK) -> AbstractContextManager[None]:
    """Return a context in which an error in reading a file of a run becomes a `UserError`.

    Args:
        advice: what to do, unless the user lacks the right to read the file.
    """
    return as_user_error(
        # JSON that is nested too deeply leads to a RecursionError.
        (OSError, ValueError, RecursionError),
        f"{path} can't be read",
        partial(advice_to_read, advice),
    )


def advice_to_read(advice: str, error: Exception) -> str:
    """Return `advice`, or other advice if the user lacks the right to read a file."""
    if isinstance(error, PermissionError):
        return "give your user the right to read it"
    return advice


def read_lines(path: Path, key: str, warn: Callable[[str], None] | None = None) -> list[JsonObject]:
    """Return the rows of a file with one JSON object per line, such as `metrics.jsonl`.

    A last line that is only half written is left out, because the process may have been killed as
    it wrote the line. A missing file has no rows.

    Args:
        key: the entry of each row that must be a number; a row without it is damaged.
        warn: prints that a damaged line is left out. Without it, a damaged line is a `UserError`.
    """
    with reading_file_of_run(path):
        try:
            lines = refuse_pipe(path).read_bytes().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []  # a run that has logged nothing
    rows = []
    for number, line in enumerate(lines, start=1):
        row = None
        with suppress(ValueError, RecursionError):
            row = parse(line)
        if isinstance(row, dict) and isinstance(row.get(key), int | float):
            rows.append(row)
        elif row is not None or number < len(lines):  # the last line may be half written
            damage = f"{path}, line {number}, is damaged"
            if warn is None:
                raise UserError(damage, advice="remove this line from the file")
            warn(f"{damage} and was left out")
    return rows
