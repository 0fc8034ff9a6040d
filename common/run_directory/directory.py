"""Names and creates a run's directory, locks it for one job, and writes its JSON files."""

import contextlib
import itertools
import math
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from common.errors import ReplacedDirectoryError, UserError
from common.failures.outcomes import Outcome, RunStatus
from common.failures.sentences import writing
from common.ranks.agreement import ask_rank_zero, gather_lists
from common.ranks.rank_exits import let_gloo_release, let_main_rank_exit_first
from common.run_directory.identity import saved_run_id, signed_config
from common.run_directory.records import (
    CHECKPOINTS_FOLDER,
    CONFIG,
    STATUS,
)
from common.run_directory.status import read_status, write_outcome
from common.storage.files import LOCK, locked
from common.storage.json_files import write_json
from common.system.launch_variables import is_main_rank, rank, several_machines

INITIAL = "initial"  # the folder with a copy of the weights of `--init-from`, for a resume
# Seconds to wait for another job, which may take this long to save a checkpoint after a signal.
PATIENCE = 60.0
MAX_LOSSES = 10  # the number of updates with a lost process that `status.json` keeps
# Printed, and added to the reason in `status.json`, if a process is lost at the same update for the
# second time. That is hardly an accident.
LOST_AGAIN = "this is the second time at update {step}, so a restart is unlikely to help"
LOST_AGAIN_ADVICE = (
    "look for ranks with different numbers of batches, a collective (gather, reduce) under a "
    "condition that not all ranks meet, or a process that is killed for its memory"
)


class TakenDirectory(NamedTuple):
    """The message of rank 0 to the other ranks after it has taken a run's directory."""

    path: Path
    run_id: str  # random, and unique to this run
    # A file that rank 0 made, and that all machines must see: see `require_shared_folder`.
    mark: Path
    is_finished: bool  # whether the run is finished, so that there is nothing to resume


class RunDirectory:
    """The directory of one run, as each rank has it.

    Rank 0 creates and locks it, and writes the JSON files. Any rank may write the status of a
    failure.
    """

    def __init__(
        self,
        output_dir: str | None,
        recipe: str,
        resume: bool,
        patience: float,
        is_finished: Callable[[], bool],
    ) -> None:
        """Create the directory and lock it for this job; called on all ranks.

        Args:
            output_dir: the directory that the user named; None takes a new one under `runs/`, named
                by recipe and time.
            recipe: the recipe's name.
            resume: whether to continue the run in `output_dir`. Otherwise, a directory that
                contains a run is refused.
            patience: the seconds to wait until another job leaves the directory, and until this
                machine sees it, at most `PATIENCE`. It must be shorter than the time after which
                the other ranks give up waiting for rank 0.
            is_finished: whether the run to resume is finished. Rank 0 calls it once no other job
                can write here. It raises a `UserError` if another run has taken the place of the
                run for which the command line was read.

        Raises:
            UserError: on all ranks. The directory can't be made, contains another run, or another
                job keeps using it; or a machine does not see it, so that its part of the
                checkpoints would be lost.
            SystemExit: with status 0, on all ranks, if the run is finished.
        """
        self.path = Path(output_dir or "")  # `take` chooses another path if the user named none
        self.run_id = ""  # random, and unique to this run; `take` chooses it
        # Whether this rank has made the directory under a name that no user chose; see `take`.
        self.is_removable = False
        self.lock = contextlib.ExitStack()
        self.has_config = False  # whether this process has written `config.json`
        self.seen_at = -math.inf  # clock time of the last check that the directory is this run's
        patience = min(patience, PATIENCE)
        try:
            taken_directory = ask_rank_zero(
                lambda: self.take(output_dir, recipe, resume, patience, is_finished)
            )
            if several_machines() and not taken_directory.is_finished:
                require_shared_folder(taken_directory.mark, patience, resume)
        except UserError:
            self.remove_if_unused()
            self.leave()
            let_main_rank_exit_first()
            raise
        self.path = taken_directory.path
        self.run_id = taken_directory.run_id
        if taken_directory.is_finished:
            self.leave()  # no caller may use a directory that is not locked
            raise SystemExit(0)

    def take(
        self,
        output_dir: str | None,
        recipe: str,
        resume: bool,
        patience: float,
        is_finished: Callable[[], bool],
    ) -> TakenDirectory:
        """Create and lock the directory on rank 0; see `__init__` for arguments and errors.

        All ranks get the returned value, through `ask_rank_zero`.
        """
        self.path = make_directory(output_dir, recipe, resume)
        self.is_removable = output_dir is None
        flag = None if resume else "--output-dir"  # a run is resumed in its own directory
        self.lock.enter_context(locked(self.path / LOCK, patience, flag))
        # Another job may have used the directory while this job waited for the lock.
        if not resume:
            refuse_to_write_over(self.path)
        elif is_finished():
            # The run is finished, and all ranks exit, so they need neither the run's id nor a mark.
            return TakenDirectory(self.path, run_id="", mark=self.path, is_finished=True)
        earlier_run_id = saved_run_id(self.path) if resume else None
        self.run_id = earlier_run_id or secrets.token_hex(8)
        # Replace the status of an earlier attempt at once, because it says nothing about this
        # attempt. None keeps the update of the earlier attempt.
        self.write_status("running", None if resume else 0)
        # All machines must see this file: see `require_shared_folder`. A machine that does not
        # share this file system may have a folder at the same path, with the mark of an earlier
        # run. The name is random, so that the machine does not take that mark for this one.
        mark = self.path / f".seen-{secrets.token_hex(4)}"
        if several_machines():
            mark.touch()
        return TakenDirectory(self.path, self.run_id, mark, is_finished=False)

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
        """Remove a directory that the user did not name, if training never began in it."""
        if not self.is_removable:
            return
        names = {path.name for path in self.path.glob("*")}
        # The status and the lock are there from the beginning. Any other file is worth keeping.
        if names <= {STATUS, LOCK}:
            self.release()  # Windows can't remove an open file
            shutil.rmtree(self.path, ignore_errors=True)

    def leave(self) -> None:
        """Unlock the directory before this process exits."""
        self.release()
        let_gloo_release()

    def release(self) -> None:
        """Unlock the directory, so that another job can use it."""
        self.lock.close()


def require_shared_folder(mark: Path, patience: float, resume: bool) -> None:
    """Raise a `UserError` on all ranks if one of them does not see a file that rank 0 has made.

    All ranks call this before training, to find machines that do not share the run's file system.
    Rank 0 then removes the file.

    Args:
        mark: the file.
        patience: the seconds to wait for the file.
        resume: whether the run is resumed, so that `--output-dir` can't name another directory.
    """
    # Wait, because NFS may hide a new folder for some time.
    deadline = time.monotonic() + patience
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    own_name = [] if mark.exists() else [f"rank {rank()} on {platform.node()}"]
    ranks_without_file = gather_lists(own_name)
    if is_main_rank():  # all ranks have looked for the file by now
        mark.unlink(missing_ok=True)
    if ranks_without_file:
        names = f"{', '.join(ranks_without_file):.200}"
        advice = "pass an --output-dir on a file system that all machines share"
        if resume:
            advice = "move this run to a file system that all machines share, and resume it there"
        raise UserError(
            (
                f"{mark.parent.absolute()} is not on a file system that all machines share: "
                f"{names} can't see what rank 0 writes there, so parts of a checkpoint would be "
                "lost"
            ),
            advice=advice,
        )


def make_directory(output_dir: str | None, recipe: str, resume: bool) -> Path:
    """Make a run's directory and return it: `output_dir`, or a new folder under `runs/`.

    Raises:
        UserError: the directory can't be made, or it contains a run and `resume` is false.
    """
    if output_dir is not None:
        path = Path(output_dir)
        if not resume:
            refuse_to_write_over(path)
        with writing(str(path) if resume else f"--output-dir {path}"):
            path.mkdir(parents=True, exist_ok=True)
            (path / LOCK).touch()  # raises an error now if the directory can't be written
        return path
    name = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    with writing(str(Path("runs").absolute())):
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):  # another run may have started in the same second
            path = Path("runs", f"{name}-{number}" if number > 1 else name)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    return path


def refuse_to_write_over(path: Path) -> None:
    """Raise a `UserError` if a directory contains a run, or a run's checkpoints."""
    if os.path.exists(path / CONFIG):
        advice = "pass another directory, or add --resume auto to continue that run"
        raise UserError(
            f"can't start in --output-dir {path}, because it already contains a run", advice=advice
        )
    checkpoints = path / CHECKPOINTS_FOLDER
    if os.path.isdir(checkpoints) and os.listdir(checkpoints):
        mistake = (
            f"can't start in --output-dir {path}, because it contains checkpoints of another run, "
            f"without its {CONFIG}"
        )
        advice = (
            "pass another directory; to continue that run instead, put its config.json back and "
            "add --resume auto"
        )
        raise UserError(mistake, advice=advice)
