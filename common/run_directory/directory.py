"""The directory of a run in progress: writes its JSON files and its status."""

import contextlib
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ReplacedDirectoryError, UserError
from common.failures.outcomes import Outcome, RunStatus
from common.run_directory.identity import saved_run_id, signed_config
from common.run_directory.records import CONFIG, STATUS
from common.run_directory.status import read_status, write_outcome
from common.storage.files import LOCK
from common.storage.json_files import write_json
from common.system.launch_variables import is_main_rank

INITIAL = "initial"  # the folder with a copy of the weights of `--init-from`, for a resume
MAX_LOSSES = 10  # the number of updates with a lost process that `status.json` keeps
# Printed, and added to the reason in `status.json`, if a process is lost at the same update for the
# second time. That is hardly an accident.
LOST_AGAIN = "this is the second time at update {step}, so a restart is unlikely to help"
LOST_AGAIN_ADVICE = (
    "look for ranks with different numbers of batches, a collective (gather, reduce) under a "
    "condition that not all ranks meet, or a process that is killed for its memory"
)


@dataclass
class RunDirectory:
    """The directory of one run, as each rank has it; `take_run_directory` makes this object.

    Rank 0 has locked the directory, and writes the JSON files. Any rank may write the status of a
    failure.
    """

    path: Path
    run_id: str  # random, and unique to this run
    lock: contextlib.ExitStack  # holds the lock on rank 0; empty on the other ranks
    is_removable: bool  # whether this rank has made the directory, under a name that no user chose
    # Whether this process has written `config.json`.
    has_config: bool = field(default=False, init=False)
    # Clock time of the last check that the directory is this run's.
    seen_at: float = field(default=-math.inf, init=False)

    def write(self, name: str, value: Mapping[str, object]) -> None:
        """Write a JSON file of the run, on rank 0.

        `config.json` also gets a digest of its contents, by which a resume notices an edit.

        Raises:
            UserError: on any rank, if the directory no longer belongs to this run.
        """
        self.require_ownership()
        if is_main_rank():
            write_json(self.path / name, signed_config(value) if name == CONFIG else value)
        self.has_config = self.has_config or name == CONFIG

    def require_ownership(self, max_age: float = 0.0) -> None:
        """Raise a `UserError` if the directory was removed, or now contains another run.

        Without this check, this job would write files into a directory that is no longer a run, or
        would damage the other run.

        Args:
            max_age: the age in seconds up to which an earlier check is enough.

        Raises:
            ReplacedDirectoryError: the directory no longer belongs to this run.
        """
        # Before `config.json` is written, there is nothing by which to recognise the directory.
        if not self.has_config or time.monotonic() - self.seen_at < max_age:
            return
        self.seen_at = time.monotonic()
        is_own = self.path.is_dir()
        # The other ranks look only for the directory. A file that rank 0 wrote on another machine
        # may become visible to them later, even on a shared file system.
        if is_main_rank():
            is_own = saved_run_id(self.path) == self.run_id
        if not is_own:
            raise ReplacedDirectoryError(self.path)

    def write_status(
        self, status: RunStatus, global_step: int | None, reason: str | None = None
    ) -> None:
        """Write the run's status to `status.json`, on rank 0; see `Status` for its values.

        Only a running or preempted run is marked as resumable. A run with another status would end
        in the same way again.

        Args:
            global_step: the updates made so far; None keeps the number in the file.
        """
        if is_main_rank():
            outcome = Outcome(status, status in ("running", "preempted"), reason)
            write_outcome(self.path, outcome, global_step, run_id=self.run_id)

    def write_failure(self, outcome: Outcome, global_step: int, is_lost_process: bool) -> bool:
        """Write to `status.json` why the run failed, unless another rank has done so.

        The first loss of a process at an update may be an accident, and a restart may succeed.
        After a second loss at the same update, the run is marked as not resumable. Otherwise a
        supervisor would restart it forever.

        Args:
            is_lost_process: whether a process was lost, for example because the system killed it.

        Returns:
            Whether this rank was the first to fail.
        """
        earlier = read_status(self.path)
        if earlier.status == "failed":
            return False
        steps_of_losses = earlier.lost_at_steps
        if is_lost_process:
            if global_step in steps_of_losses:
                again = f"{LOST_AGAIN.format(step=global_step)}: {LOST_AGAIN_ADVICE}"
                outcome = outcome._replace(resumable=False, reason=f"{outcome.reason}; {again}")
            steps_of_losses = [*steps_of_losses, global_step][-MAX_LOSSES:]
        with contextlib.suppress(UserError):  # the disk may be full; the reason is printed anyway
            write_outcome(self.path, outcome, global_step, steps_of_losses=steps_of_losses)
        return True

    def remove_if_unused(self) -> None:
        """Remove the directory if no user chose its name, and training never began in it.

        Otherwise, each run that fails early would leave a useless directory under `runs/`.
        """
        if self.is_removable:
            remove_if_unused(self.path, self.lock)

    def release(self) -> None:
        """Unlock the directory, so that another job can use it."""
        self.lock.close()


def remove_if_unused(path: Path, lock: contextlib.ExitStack) -> None:
    """Release and remove a run's directory if training never began in it.

    Args:
        lock: holds the lock of the directory.
    """
    names = {file.name for file in path.glob("*")}
    # The status and the lock are there from the beginning. Any other file is worth keeping.
    if names <= {STATUS, LOCK}:
        lock.close()  # Windows can't remove an open file
        shutil.rmtree(path, ignore_errors=True)
