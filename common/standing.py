"""The present status of a run: its `status.json`, corrected if the job that wrote it is gone."""

from pathlib import Path
from typing import Any

from common.directory import LOCK, read_status
from common.platforms import is_lock_free, quoted

STOPPED = "stopped"  # the job of the run was killed before it could change the status


def present_status(directory: Path) -> dict[str, Any]:
    """Return the contents of `status.json`, with the status ``stopped`` if the job was killed.

    A job that is killed leaves the status ``running`` behind, but the system releases its lock.
    """
    status = read_status(directory)
    if status.get("status") == "running" and is_lock_free(directory / LOCK):
        return {**status, "status": STOPPED, "reason": "its process ended without a word"}
    return status


def advice_to_go_on(directory: Path) -> str:
    """Return what to do about an unfinished run: resume it only where that can work."""
    status = present_status(directory)
    if not (directory / "config.json").is_file():
        return "it ended before training began: start it again"
    if status.get("resumable") is False:
        reason = str(status.get("reason") or "its status.json does not say why")
        return f"it would end so again ({reason}): start another"
    return f"go on with it by --resume {quoted(directory)}"
