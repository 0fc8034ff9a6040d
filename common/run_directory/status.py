"""Reads and writes a run's `status.json`, which says how the run ended."""

import contextlib
import os
from pathlib import Path

from common.errors import UserError
from common.failures.outcomes import Outcome
from common.run_directory.record_files import read_record
from common.run_directory.records import CONFIG, STATUS, Status
from common.storage.files import LOCK, locked
from common.storage.json_files import write_json
from common.system.launch_variables import is_main_rank
from common.system.platforms.commands import quoted
from common.system.platforms.files import is_unlocked


def read_status(path: Path) -> Status:
    """Return the contents of a run's `status.json`; an unknown status if it can't be read."""
    with contextlib.suppress(UserError):
        return read_record(path / STATUS, Status)
    return Status()


def write_outcome(
    path: Path,
    outcome: Outcome,
    global_step: int | None = None,
    *,
    run_id: str | None = None,
    steps_of_losses: list[int] | None = None,
) -> None:
    """Write `status.json`.

    An argument that is None is taken from the earlier `status.json`. The updates at which earlier
    attempts lost a process are kept until the run is finished.
    """
    earlier = read_status(path)
    if global_step is None:
        global_step = earlier.global_step
    if steps_of_losses is None:
        steps_of_losses = earlier.lost_at_steps
    facts = {**outcome._asdict(), "global_step": global_step}
    if run_id or earlier.run_id:
        facts["run_id"] = run_id or earlier.run_id
    if steps_of_losses and outcome.status != "finished":
        facts["lost_at_steps"] = steps_of_losses
    write_json(path / STATUS, Status(**facts).to_json())


def write_refusal(directory: str | Path | None, outcome: Outcome, *, is_resumed: bool) -> None:
    """Write to `status.json` of an unfinished run why a command could not continue it.

    A supervisor may repeat the command until the run is finished. Without the reason in the status,
    the supervisor would never stop. Nothing is written if the directory contains no run or a
    finished one, or if another job uses it.

    Args:
        directory: the run's directory, as the command named it. With None, nothing is written.
        outcome: the failure of the command.
        is_resumed: whether the command resumes a run.
    """
    if directory is None or not is_main_rank():
        return
    path = Path(directory)
    # Without --resume, a run in the directory belongs to another command.
    if not is_resumed and os.path.exists(path / CONFIG):
        return
    if read_status(path).status in ("unknown", "finished"):  # "unknown": there is no run
        return
    # The lock is taken if another job is running. The error is then left out of the file, but the
    # command prints it in any case.
    with contextlib.suppress(UserError), locked(path / LOCK, timeout=0):
        write_outcome(path, outcome)


def current_status(directory: Path) -> Status:
    """Return the contents of `status.json`, with the status ``stopped`` if the job was killed.

    The status is unknown if the file can't be read.
    """
    return stopped_if_killed(read_status(directory), directory)


def stopped_if_killed(status: Status, directory: Path) -> Status:
    """Return a run's status, which becomes ``stopped`` if the job was killed.

    After a job is killed, `status.json` still has the status ``running``, but the job's lock is
    free.
    """
    if status.status == "running" and is_unlocked(directory / LOCK):
        reason = "its process ended before it could record a reason"
        return status.model_copy(update={"status": "stopped", "reason": reason})
    return status


def advice_to_go_on(directory: Path) -> str:
    """Return the advice for a user whose run is unfinished: resume it, or start another.

    A tool that needs a finished run gives this advice.
    """
    status = current_status(directory)
    if status.status == "running":
        return "wait until it has finished"
    if not (directory / CONFIG).is_file():
        return "repeat the command that started it, because it ended before training began"
    if status.resumable is False:
        reason = status.reason or "its status.json does not say why"
        # The same command would fail again, so name the reason. It may be a wrong flag, or an error
        # of the training itself, and may end in advice of its own.
        return (
            f"correct what made its last command fail ({reason}), and then continue its training "
            f"with --resume {quoted(directory)}, unless that error asks for another run"
        )
    return f"continue its training with --resume {quoted(directory)}"
