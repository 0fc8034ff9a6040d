"""Finds the present status of a run: its `status.json`, corrected if its job was killed."""

from pathlib import Path

from common.run_directory.directory import read_status
from common.run_directory.records import CONFIG, Status
from common.storage.files import LOCK
from common.system.platforms import is_unlocked, quoted


def present_status(directory: Path) -> Status:
    """Return the contents of `status.json`, with the status ``stopped`` if the job was killed.

    After a job is killed, the file still has the status ``running``, but the job's lock is free.
    """
    status = read_status(directory)
    if status.status == "running" and is_unlocked(directory / LOCK):
        reason = "its process ended before it could record a reason"
        return status.model_copy(update={"status": "stopped", "reason": reason})
    return status


def advice_to_go_on(directory: Path) -> str:
    """Return the advice for a user whose run is unfinished: resume it, or start another.

    A tool that needs a finished run gives this advice.
    """
    status = present_status(directory)
    if status.status == "running":
        return "wait until it has finished"
    if not (directory / CONFIG).is_file():
        return "repeat the command that started it, because it ended before training began"
    if status.resumable is False:
        reason = status.reason or "its status.json does not say why"
        # The same command would fail again, so name the reason. It may be a wrong flag, or an error
        # of the training itself.
        return (
            f"correct what made its last command fail ({reason}) and continue it with --resume "
            f"{quoted(directory)}, or start another run"
        )
    return f"continue it with --resume {quoted(directory)}"
