"""The present status of a run: its `status.json`, corrected if the job that wrote it is gone."""

import fcntl
import os
from pathlib import Path

from common.directory import LOCK, read_status
from common.records import Status


def present_status(directory: Path) -> Status:
    """Return the contents of `status.json`, with the status ``stopped`` if the job was killed.

    A job that is killed leaves the status ``running`` behind, but the system releases its lock.
    """
    status = read_status(directory)
    if status.status == "running" and is_released(directory / LOCK):
        correction = {"status": "stopped", "reason": "its process ended without a word"}
        return status.model_copy(update=correction)
    return status


def is_released(lock_file: Path) -> bool:
    """Whether a lock file exists and no process holds the lock; False if that can't be found out.

    The file is opened for reading only. A shared lock is tried without waiting, and released at
    once.
    """
    try:
        descriptor = os.open(lock_file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def advice_to_go_on(directory: Path) -> str:
    """Return what to do about an unfinished run: resume it only where that can work."""
    status = present_status(directory)
    if not (directory / "config.json").is_file():
        return "it ended before training began: start it again"
    if status.resumable is False:
        reason = status.reason or "its status.json does not say why"
        return f"it would end so again ({reason}): start another"
    return f"go on with it by --resume {directory}"
