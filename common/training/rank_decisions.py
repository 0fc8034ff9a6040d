"""Decisions of all ranks between two updates: to stop, or that a checkpoint failed or is old."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.checkpoints.folders import step_folders
from common.checkpoints.save_failure import SaveFailure
from common.errors import Preempted, ReplacedDirectoryError, TrainingError
from common.failures.disk_errors import advice_for
from common.ranks.agreement import (
    announce,
    gather_from_ranks,
    is_announced,
    sum_in_fp32,
    wait_for_ranks,
)
from common.run_directory.records import CHECKPOINTS_FOLDER
from common.system.launch_variables import is_main_rank
from common.system.platforms.commands import quoted
from common.training.sharding.accelerator import ShardingAccelerator
from common.training.stop_request import StopRequest

LOOK_EVERY = 1.0  # seconds between two looks into the store for other ranks' announcements
# The end of an epoch has a checkpoint if the last checkpoint is at least this old. Epochs may last
# milliseconds, and a checkpoint takes longer.
CHECKPOINT_SECONDS = 30.0
ANNOUNCEMENT = "stop-requested"


class LastCheck(NamedTuple):
    """When the ranks agreed for the last time."""

    global_step: int
    seconds: float  # this rank's clock


class Votes(NamedTuple):
    """The answers of one rank, or those of any rank."""

    is_stop_requested: bool
    has_failed: bool  # whether a checkpoint could not be written
    is_checkpoint_old: bool


@dataclass
class RankDecisions:
    """The decisions that all ranks take together about once a second, after the same update.

    They agree on whether to stop, on whether a rank failed to write a checkpoint, and on whether
    the last checkpoint is old, by rank 0's clock.
    """

    accelerator: ShardingAccelerator
    directory: Path
    # Returns why this rank could not write its last checkpoint; None if it could.
    find_failure: Callable[[], SaveFailure | None]
    request: StopRequest
    stopping: bool = False  # whether all ranks have agreed to stop
    check_every: int = 1  # updates between two checks, the same on all ranks
    last_check: LastCheck | None = None
    # Whether a rank announced a request in the process group's store.
    is_request_announced: bool = False
    looks_again_at: float = 0.0  # clock at which this rank looks into the store again
    is_checkpoint_old: bool = True  # the same on all ranks; true where there is no checkpoint yet
    saved_at: float = -math.inf  # clock of the last checkpoint

    def note_checkpoint(self) -> None:
        """Count the age of the last checkpoint from now on; called on all ranks."""
        self.saved_at = time.perf_counter()
        self.is_checkpoint_old = False

    def check(self, global_step: int) -> None:
        """Set `stopping` on all ranks if any of them was asked to stop; called on all ranks.

        This also sets `is_checkpoint_old` on all ranks.

        Raises:
            TrainingError: on all ranks, if a rank could not write its last checkpoint.
        """
        failure = self.find_failure()
        age = time.perf_counter() - self.saved_at
        is_old = age >= CHECKPOINT_SECONDS and is_main_rank()
        is_requested = self.request.reason is not None
        votes = Votes(is_requested, failure is not None, is_old)
        if self.accelerator.num_processes > 1:
            votes = self.votes_of_all(votes, global_step)
        self.stopping = votes.is_stop_requested
        self.is_checkpoint_old = votes.is_checkpoint_old
        if votes.has_failed:
            self.raise_failure(failure)

    def raise_failure(self, own_failure: SaveFailure | None) -> None:
        """Raise the same `TrainingError` on all ranks, with the cause and what to do.

        A supervisor starts the run again if the error is `resumable`. Only a failure of the disk
        is: the disk may work, or have space, by then.
        """
        failures_of_ranks = gather_from_ranks(self.accelerator, own_failure)
        failures = [failure for failure in failures_of_ranks if failure is not None]
        # Rank 0 may only report that another rank failed. That rank knows the cause, so its own
        # report is preferred. If that rank is gone, only rank 0's report is known.
        first_hand = [failure for failure in failures if not failure.is_from_other_rank]
        cause = (first_hand or failures)[0]
        if cause.is_replaced:  # there is no earlier checkpoint to go on from
            raise TrainingError(cause.message, advice=ReplacedDirectoryError.ADVICE)
        raise TrainingError(
            f"a checkpoint of {self.directory} could not be written ({cause})",
            advice=(
                f"{advice_for(cause.message, cause.error_number)}, then {self.advice_to_resume()}"
            ),
            resumable=cause.is_disk_error,
        )

    def advice_to_resume(self) -> str:
        """Return the advice to resume, with the place from which the resume trains on."""
        flag = f"--resume {quoted(self.directory)}"
        if step_folders(self.directory / CHECKPOINTS_FOLDER):
            return f"continue from the checkpoint before it with {flag}"
        return f"start again from the beginning with {flag}, because there is no other checkpoint"

    def votes_of_all(self, own_votes: Votes, global_step: int) -> Votes:
        """Return for each question whether any rank votes yes; called on all ranks.

        This also chooses the interval to the next check.
        """
        now = time.perf_counter()
        last_check = self.last_check or LastCheck(global_step, now)
        self.last_check = LastCheck(global_step, now)
        *counts, seconds = sum_in_fp32(self.accelerator, [*own_votes, now - last_check.seconds])
        self.choose_interval(global_step - last_check.global_step, seconds)
        return Votes(*(count > 0 for count in counts))

    def choose_interval(self, updates: int, seconds_of_ranks: float) -> None:
        """Set `check_every` so that a check comes about once a second.

        Args:
            updates: those since the last check.
            seconds_of_ranks: the time since the last check, added up over all ranks.
        """
        if updates > 0:
            updates_of_ranks = updates * self.accelerator.num_processes
            self.check_every = max(1, int(updates_of_ranks / max(seconds_of_ranks, 1e-3)))

    def is_stop_announced(self) -> bool:
        """Whether any rank was asked to stop, as far as this rank knows.

        Loaders call this before each batch of an evaluation, to end it early.

        Without FSDP, ranks may have different numbers of batches, so they use no collective. A rank
        that was asked to stop announces it in the process group's store, and the others look there
        about once a second. With FSDP, ranks use a collective, so all of them must call this
        equally often.
        """
        is_requested = self.request.reason is not None
        if self.accelerator.mesh is not None:
            # With FSDP, all ranks call this before each batch, so a collective can ask them.
            (requests,) = sum_in_fp32(self.accelerator, [is_requested])
            return requests > 0
        is_stop_known = self.stopping or self.is_request_announced
        if self.accelerator.num_processes > 1 and not is_stop_known:
            self.announce_or_look(is_requested)
        return self.stopping or self.is_request_announced or is_requested

    def announce_or_look(self, is_requested: bool) -> None:
        """Announce this rank's request in the store, or look there for another rank's request.

        The store ends with the launcher. Then nothing is announced or seen, and nothing has to be:
        the end of the launcher asks each of its ranks to stop.
        """
        now = time.monotonic()
        with suppress(RuntimeError):  # the store has ended
            if is_requested:
                announce(ANNOUNCEMENT)
                self.is_request_announced = True
            elif now >= self.looks_again_at:
                self.looks_again_at = now + LOOK_EVERY
                self.is_request_announced = is_announced(ANNOUNCEMENT)

    def stop(self, global_step: int) -> None:
        """End this process, with everything saved; called on all ranks.

        Raises:
            TrainingError: a rank could not write its checkpoint.
            Preempted: otherwise.
        """
        self.check(global_step)  # raises an error if a rank could not write the checkpoint
        wait_for_ranks(self.accelerator)
        reason = self.request.reason or "a signal to another rank"
        raise Preempted(
            f"stopped after update {global_step} by {reason}; everything is saved: "
            f"continue it with --resume {quoted(self.directory)}",
            is_by_ctrl_c=self.request.is_by_ctrl_c,
        )
