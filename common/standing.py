"""How a run stands now: its `status.json`, corrected where the job that wrote it is gone."""

import fcntl
import os
from pathlib import Path
from typing import Any

from common.directory import LOCK, read_status

STOPPED = "stopped"  # a run whose job was killed: it could not change its status any more


def present_status(directory: Path) -> dict[str, Any]:
    """Return what `status.json` holds; a run that no job works on any more is ``stopped``.

    A job that is killed leaves the status ``running`` behind, but not the lock that it held.
    """
    status = read_status(directory)
    if status.get("status") == "running" and is_released(directory / LOCK):
        return {**status, "status": STOPPED, "reason": "its process ended without a word"}
    return status


def is_released(lock_file: Path) -> bool:
    """Whether a lock file is there and no process holds it; False where that can't be told.

    The file is opened for reading only. The shared lock fails at once where a job has the lock, and
    is given back at once where none has.
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
    if status.get("resumable") is False:
        reason = str(status.get("reason") or "its status.json does not say why")
        return f"it would end so again ({reason}): start another"
    return f"go on with it by --resume {directory}"
