"""Read and write files, whole or not at all.

What reads, and what writes text, raises a `UserError`; what waits for the disk, its own errors.
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
from typing import Any, TextIO

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from common.errors import UserError, is_of_disk
from common.platforms import rename_path, replace_file, sync

MOST_WORDS = 300  # characters of a library's message that are repeated
UNFINISHED = ".unfinished"
SUPERSEDED = ".superseded"
# JSON has no words for NaN and infinities, though Python writes some: they are missing.
parse = partial(json.loads, parse_constant=lambda name: None)


@contextmanager
def writing(what: str, advice: str = "") -> Iterator[None]:
    """Turn a failure to write `what` into a sentence."""
    try:
        yield
    except (OSError, SafetensorError, RecursionError) as problem:  # of a thousand folders
        then = f": {advice}" if advice else ""
        message = f"{what} can't be made or written ({problem}){then}"
        raise UserError(message, resumable=is_of_disk(problem)) from None


@contextmanager
def reading(what: str, advice: str = "") -> Iterator[None]:
    """Turn what a library raises on a file of the user's into a sentence; it may be anything.

    But for a full disk, to which libraries write what they read: that is an `OSError` still.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as problem:  # of Rust's panics, too
        cause = problem.__cause__ or problem
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise cause from None
        words = " ".join(str(cause).split())[:MOST_WORDS]
        then = f": {advice}" if advice else ""
        raise UserError(f"{what} can't be read ({type(cause).__name__}: {words}){then}") from None


def write_text(path: Path, text: str) -> None:
    """Replace a file by a rename: a reader never meets half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(str(path)):
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            replace_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(json_safe(value), indent=2) + "\n")


def json_safe(value: Any) -> Any:
    """Replace what JSON has no word for: NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {name: json_safe(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(held) for held in value]
    return None if isinstance(value, float) and value - value != 0 else value


def plain(path: Path) -> Path:
    """Return a path that does not lead to a pipe or a device: to read one may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is no file but a pipe or a device")
    return path


def open_to_append(path: Path) -> TextIO:
    with writing(str(path)):
        return plain(path).open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def has_moved(before: Any, now: Any) -> bool:
    """Whether one absolute path leads nowhere any more, and another path leads to something."""
    is_gone = isinstance(before, str) and os.path.isabs(before) and not os.path.exists(before)
    return is_gone and isinstance(now, str) and os.path.exists(now)


def read_json(path: Path) -> dict[str, Any]:
    value = read_json_if_there(path)
    if value is None:
        raise UserError(f"{path} does not exist")
    return value


def read_json_if_there(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no such file."""
    try:
        value = parse(plain(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path} can't be read ({type(problem).__name__}): {problem}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not what a recipe wrote: it holds no object")
    return value


def read_lines(
    path: Path, key: str, say: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line, each with a number at `key`.

    A last line that is only half written is left out. Any other that is damaged is a `UserError`,
    or left out as well by a reader who is to `say` so.
    """
    try:
        lines = plain(path).read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []  # a run that has logged nothing
    except OSError as problem:
        raise UserError(f"{path} can't be read: {problem}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        row = None
        with suppress(ValueError, RecursionError):
            row = parse(line)
        if isinstance(row, dict) and isinstance(row.get(key), int | float):
            rows.append(row)
        elif row is not None or number < len(lines):
            damage = f"{path}, line {number}, is damaged"
            if say is None:
                raise UserError(f"{damage}: take the line out to go on")
            say(f"{damage}, and left out")
    return rows


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def signed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with a digest of all else that it holds."""
    said = {name: held for name, held in value.items() if name != "sha256"}
    return said | {"sha256": digest_of(said)}


@contextmanager
def locked(path: Path, patience: float = -1) -> Iterator[None]:
    """Hold a lock, where the file system knows locks and lets this user have one.

    A `UserError` after so many seconds, if they are not negative, of another job's holding it.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        advice = "wait for its end, or name another --output-dir"
        raise UserError(f"another job writes to {path.parent}: {advice}") from None
    except (NotImplementedError, OSError):
        pass
    try:
        yield
    finally:
        lock.release()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which replaces another one of its name when it is on the disk.

    Who has the other one open keeps it; where this fails, it is there still, or put aside.
    """
    names = (folder.name + ending for ending in (UNFINISHED, SUPERSEDED))
    unfinished, superseded = map(folder.with_name, names)
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


def receipt_of(path: Path) -> dict[str, Any]:
    """Return a file's size and SHA-256."""
    with plain(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}
