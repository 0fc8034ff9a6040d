"""Reads and writes files and folders, each completely or not at all.

Functions that read, and those that write text, raise a `UserError` with a sentence. Functions that
sync with the disk let an `OSError` through, and their callers use `writing`.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypedDict

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from common.errors import UserError, advice_for, is_of_disk
from common.system.platforms import rename_path, replace_file, sync

PUT_BACK = "put a whole copy of it back"  # the action for a damaged or missing file
MOST_CHARACTERS = 300  # of a library's message that a sentence repeats
UNFINISHED = ".unfinished"  # ends the name of a file or folder that is still being written
SUPERSEDED = ".superseded"  # ends the name of one that is replaced, until the new one is complete
# A JSON object as Python reads it, with values of any type. `common.run_directory.records` has the
# types of the files in a run's directory.
JsonObject = dict[str, Any]
SIGNATURE = "sha256"  # the entry of a signed JSON object with the digest of all other entries
# NaN and infinities, which Python writes although JSON has no names for them, become None.
parse = partial(json.loads, parse_constant=lambda name: None)


@contextmanager
def writing(subject: str, advice: str = "") -> Iterator[None]:
    """Turn an error while a file or folder is written into a `UserError`.

    Args:
        subject: what is written, the first words of the message, such as a path or a flag.
        advice: what the user can do; empty for the advice that fits the error itself.
    """
    try:
        yield
    # Folders that are nested a thousand deep lead to a RecursionError.
    except (OSError, SafetensorError, RecursionError) as error:
        problem = f"{subject} can't be made or written ({error})"
        advice = advice or advice_for(str(error))
        raise UserError(problem, advice=advice, resumable=is_of_disk(error)) from None


@contextmanager
def reading(subject: str, advice: str, *, resumable: bool = False) -> Iterator[None]:
    """Turn any error while a library reads a user's file into a `UserError`.

    A full disk stays an `OSError`: libraries write caches of the files that they read, and the file
    itself may be fine.

    Args:
        subject: what is read, the first words of the message, such as a path or a flag.
        advice: what the user can do.
        resumable: whether the same command may succeed later, as with a file of the Hub.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust code is no Exception
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise cause from None
        words = " ".join(str(cause).split())[:MOST_CHARACTERS]
        problem = f"{subject} can't be read ({type(cause).__name__}: {words})"
        raise UserError(problem, advice=advice, resumable=resumable) from None


def write_text(path: Path, text: str) -> None:
    """Write a text file, or replace it; a reader never sees half of the text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # no other process writes this one
    with writing(str(path)):
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            replace_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file, or replace it; NaN and infinities become null."""
    write_text(path, json.dumps(json_safe(value), indent=2) + "\n")


def json_safe(value: object) -> Any:
    """Return a nested value that JSON can express: NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    is_not_finite = isinstance(value, float) and value - value != 0  # the difference is NaN then
    return None if is_not_finite else value


def plain(path: Path) -> Path:
    """Return the path; an OSError if it is a pipe or a device, from which a read may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is no file but a pipe or a device")
    return path


def open_to_append(path: Path) -> TextIO:
    """Open a text file to add lines at its end; a `UserError` if that fails."""
    with writing(str(path)):
        return plain(path).open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def has_moved(before: object, now: object) -> bool:
    """Whether a user has moved a data set, so that a resume may read it from another path.

    The old path, which is absolute, no longer exists, and the new one does. Values that are no
    paths, such as the names of data sets, have not moved.
    """
    is_gone = isinstance(before, str) and os.path.isabs(before) and not os.path.exists(before)
    return is_gone and isinstance(now, str) and os.path.exists(now)


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a file; a `UserError` if it is missing or can't be read."""
    value = read_json_if_there(path)
    if value is None:
        raise UserError(f"{path} does not exist", advice=PUT_BACK)
    return value


def read_json_if_there(path: Path) -> JsonObject | None:
    """Return the JSON object in a file; None if there is no such file.

    Raises:
        UserError: the file can't be read, or it contains no JSON object.
    """
    try:
        value = parse(plain(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path} can't be read ({type(error).__name__}: {error})"
        raise UserError(problem, advice=advice_to_read(error)) from None
    if not isinstance(value, dict):
        problem = f"{path} is not what a recipe wrote, because it holds no JSON object"
        raise UserError(problem, advice=PUT_BACK)
    return value


def advice_to_read(error: BaseException) -> str:
    """Return what to do about a file that a recipe wrote and that can't be read."""
    if isinstance(error, PermissionError):
        return "give this user the right to read it"
    return PUT_BACK


def read_lines(path: Path, key: str, say: Callable[[str], None] | None = None) -> list[JsonObject]:
    """Return the rows of a file with one JSON object per line, such as `metrics.jsonl`.

    A last line that is only half written is left out. A missing file has no rows.

    Args:
        key: the entry of each row that must be a number; a row without it is damaged.
        say: prints that a damaged line is left out. Without it, a damaged line is a `UserError`.
    """
    try:
        lines = plain(path).read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []  # a run that has logged nothing
    except OSError as error:
        raise UserError(f"{path} can't be read ({error})", advice=advice_to_read(error)) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        row = None
        with suppress(ValueError, RecursionError):
            row = parse(line)
        if isinstance(row, dict) and isinstance(row.get(key), int | float):
            rows.append(row)
        elif row is not None or number < len(lines):  # else the last line, which is half written
            damage = f"{path}, line {number}, is damaged"
            if say is None:
                raise UserError(damage, advice="remove that line")
            say(f"{damage}, and left out")
    return rows


def digest_of(value: object) -> str:
    """Return the SHA-256 of a value as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def signed(value: Mapping[str, object]) -> JsonObject:
    """Return a JSON object with the digest of its other entries as `SIGNATURE`.

    An object that was written so equals its `signed` again, unless it has been edited.
    """
    entries = {name: entry for name, entry in value.items() if name != SIGNATURE}
    return entries | {SIGNATURE: digest_of(entries)}


@contextmanager
def locked(path: Path, patience: float = -1) -> Iterator[None]:
    """Hold a lock file, so that no other job writes to its folder.

    On a file system without locks, or if this user may not lock, nothing is locked.

    Args:
        patience: seconds to wait for another job that holds the lock; -1 waits without end.

    Raises:
        UserError: another job still holds the lock.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        advice = "wait for its end, or name another --output-dir"
        raise UserError(f"another job writes to {path.parent}", advice=advice) from None
    except (NotImplementedError, OSError):
        pass  # there are no locks here, or this user may not lock: go on without
    try:
        yield
    finally:
        lock.release()


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; a missing file is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Write a folder, or replace it, completely or not at all.

    Yields an empty folder to fill. When the block ends, that folder is synced and takes the name
    `folder`. A program that has files of the earlier folder open can still read them. If an error
    occurs, the earlier folder is still there, possibly under its `SUPERSEDED` name.
    """
    unfinished = folder.with_name(folder.name + UNFINISHED)
    superseded = folder.with_name(folder.name + SUPERSEDED)
    remove(unfinished)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
        remove(superseded)
        if folder.exists():
            rename_path(folder, superseded)
        rename_path(unfinished, folder)
        sync(folder.parent)
        remove(superseded)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class FileReceipt(TypedDict):
    """The size and the digest of a file."""

    size: int  # bytes
    sha256: str


def receipt_of(path: Path) -> FileReceipt:
    """Return the size and SHA-256 of a file, which is read whole; an OSError if it can't be."""
    with plain(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}
