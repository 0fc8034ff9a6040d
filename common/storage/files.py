"""Writes files and folders completely or not at all, and locks them.

Functions that write text raise a `UserError` with a sentence. Functions that sync with the disk let
an `OSError` through, and their callers use `common.failures.sentences.writing`.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from common.console import say
from common.errors import UserError
from common.failures.sentences import writing
from common.system.platforms.files import rename_path, replace_file, sync

LOCK = ".lock"  # the file that a process locks, in a folder that only one may write to
UNFINISHED = ".unfinished"  # ends the name of a file or folder that is still being written
SILENT_WAIT = 2.0  # seconds to wait for a lock before the user is told
SUPERSEDED = ".superseded"  # ends the name of a replaced file or folder, until the new is complete


def temporary_beside(path: Path) -> Path:
    """Return the path of this process's own temporary file for a file that it writes."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def require_writable(path: Path, subject: str) -> None:
    """Raise a `UserError` if a file can't be written; a file that is already there stays as it is.

    Args:
        subject: what will be written, the first words of the message, such as a flag and its value.
    """
    temporary = temporary_beside(path)
    with writing(subject):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        try:
            temporary.touch()
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, or replace it; a reader never sees half of the text."""
    temporary = temporary_beside(path)
    with writing(str(path)):
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            replace_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def refuse_pipe(path: Path) -> Path:
    """Return the path; an OSError if it is a pipe or a device, from which a read may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is not a file but a pipe or a device")
    return path


def open_to_append(path: Path) -> TextIO:
    """Open a text file to add lines at its end; a `UserError` if that fails."""
    with writing(str(path)):
        return refuse_pipe(path).open(
            "a", encoding="utf-8", errors="backslashreplace", newline="\n"
        )


@contextmanager
def locked(
    path: Path,
    timeout: float = -1,
    flag: str | None = "--output-dir",
    other_job: str | None = None,
) -> Iterator[None]:
    """Hold a lock file while the block runs, so that only one job at a time writes.

    The lock protects only against jobs that take the same lock file. A wait of more than
    `SILENT_WAIT` seconds is told to the user.

    On a file system without locks, or if this user may not lock, nothing is locked.

    Args:
        timeout: seconds to wait for another job that holds the lock; -1 waits without end.
        flag: the flag that can name another folder, for the error; None if only this folder will
            do, because the command resumes a run.
        other_job: says what a job that holds the lock is doing (default: that it is writing to the
            folder of the lock).

    Raises:
        UserError: another job still holds the lock.
    """
    lock = FileLock(path)
    other_job = other_job or f"another job is writing to {path.parent}"
    try:
        acquire(lock, timeout, other_job)
    except Timeout:
        alternative = "stop it" if flag is None else f"pass another {flag}"
        advice = f"wait until it has ended, or {alternative}"
        raise UserError(other_job, advice=advice) from None
    except (NotImplementedError, OSError):
        pass  # go on without a lock: there are none here, or this user may not lock
    try:
        yield
    finally:
        lock.release()


def acquire(lock: FileLock, timeout: float, other_job: str) -> None:
    """Acquire a lock, and tell the user if that takes longer than `SILENT_WAIT` seconds.

    See `locked` for the arguments.

    Raises:
        Timeout: another job still holds the lock.
    """
    waits_without_end = timeout < 0
    silent_wait = SILENT_WAIT if waits_without_end else min(timeout, SILENT_WAIT)
    try:
        lock.acquire(timeout=silent_wait)
        return
    except Timeout:
        if silent_wait == timeout:
            raise
    limit = "" if waits_without_end else f" for up to {timeout:.0f} s"
    say(f"{other_job}; this one waits{limit}")
    lock.acquire(timeout=-1 if waits_without_end else timeout - SILENT_WAIT)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; a missing file is not an error."""
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
