"""Writes files to the disk for good, renames them, and asks for their locks."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from common.system.platforms import current

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows does not have it
    fcntl = None

# Windows can't open folders. Its file systems write the names in them to their journals instead.
CAN_SYNC_FOLDERS = hasattr(os, "O_DIRECTORY")
# Windows only syncs files that are open for writing.
SYNC_MODE = os.O_RDWR if current.IS_WINDOWS else os.O_RDONLY
# Whether a file can be renamed, replaced and removed while a process has it open. Windows refuses
# this, and there a virus scanner or an indexer opens each new file for a moment. So on Windows, a
# refused rename is tried again for the seconds below.
CAN_MOVE_OPEN_FILES = not current.IS_WINDOWS
MOVE_RETRY_SECONDS = 5.0


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, if the system can do so."""
    if not CAN_SYNC_FOLDERS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else SYNC_MODE)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Wait until the contents of an open file are on the disk."""
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):
        # Apple's fsync does not wait for the drive's own cache. A full sync does, but only some
        # file systems have it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def rename_path(source: Path, target: Path) -> None:
    """Rename a file or folder to a free name; on Windows, wait until no program has it open."""
    retry_while_open(lambda: os.rename(source, target))


def replace_file(source: Path, target: Path) -> None:
    """Rename a file over another file; on Windows, wait until no program has either open."""
    retry_while_open(lambda: os.replace(source, target))


def retry_while_open(move: Callable[[], None]) -> None:
    """Move files; on Windows, try again while another program has them open.

    Raises:
        OSError: the system refuses, on Windows for `MOVE_RETRY_SECONDS`.
    """
    deadline = time.monotonic() + (0 if CAN_MOVE_OPEN_FILES else MOVE_RETRY_SECONDS)
    while True:
        try:
            return move()
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)


def is_unlocked(lock_file: Path) -> bool:
    """Whether a lock file exists and no process holds its lock; False if that is unknown.

    The file is not changed. For a moment, this holds a shared lock, which only a job that takes the
    lock at this moment can notice. For Windows, see `can_take_lock`.
    """
    if fcntl is None:
        return can_take_lock(lock_file)
    try:
        # The file is opened only for reading, because it may be another user's. Without O_NONBLOCK,
        # a pipe in its place would block this process.
        descriptor = os.open(lock_file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A shared lock is refused while a job holds an exclusive one. Closing the file releases it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def can_take_lock(lock_file: Path) -> bool:
    """Whether a lock file exists and no process holds its lock; only used on Windows.

    Windows has no other test than taking the lock. It is released again at once.
    """
    from filelock import FileLock, Timeout

    if not lock_file.is_file():
        return False
    try:
        with FileLock(lock_file, timeout=0):
            pass
        lock_file.touch()  # create it again: on Windows, the release of the lock has removed it
    except (Timeout, NotImplementedError, OSError):  # some file systems have no locks
        return False
    return True
