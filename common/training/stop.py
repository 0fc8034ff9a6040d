"""Requests to stop: received at any time, agreed on by all ranks, obeyed between two updates."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.checkpoints.store import SaveFailure
from common.errors import Preempted, ReplacedDirectoryError, TrainingError
from common.failures.disk_errors import advice_for
from common.ranks.agreement import (
    announce,
    gather_from_ranks,
    is_announced,
    sum_in_fp32,
    wait_for_ranks,
)
from common.system.machine import is_main_rank
from common.system.platforms import (
    HANGUP,
    PARENT_ENDED,
    STOP_SIGNAL_NAMES,
    STOP_SIGNALS,
    WATCHES_PARENT,
    is_orphan,
    quoted,
    signal_when_parent_ends,
)
from common.training.sharding import ShardingAccelerator

# A handler of a signal, as `signal.getsignal` returns it: a function, a constant such as SIG_DFL,
# or None if C code installed the handler.
Handler = Callable[[int, FrameType | None], object] | int | None
# The variables that tell a process to watch for the end of its parent. `accelerate launch` sets the
# first variable, and torchrun the second. With one process, `accelerate launch` does not pass
# signals on, so its end must serve as the signal. A search sets the third variable for its trials,
# on systems whose kernel does not signal the end of a parent.
SET_BY_LAUNCHERS = {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID", WATCHES_PARENT}
# The terminal and the launcher may both pass on the same Ctrl-C. A signal within this time after
# the first is taken for the same request.
SAME_REQUEST_SECONDS = 1.0
LOOK_EVERY = 1.0  # seconds between two looks into the store for other ranks' announcements
# The end of an epoch has a checkpoint if the last checkpoint is at least this old. Epochs may last
# milliseconds, and a checkpoint takes longer.
CHECKPOINT_SECONDS = 30.0
ANNOUNCEMENT = "stop-requested"


class StopRequest:
    """Remembers that a signal asked this process to stop; a second signal ends it at once."""

    def __init__(self, acts_on_signals: bool) -> None:
        """Start to receive signals.

        Args:
            acts_on_signals: whether the run will act on a request. If not, signals end the process
                as usual.
        """
        self.reason: str | None = None  # what asked this process to stop, such as "SIGTERM"
        self.is_by_ctrl_c = False
        self.since = 0.0  # clock of the first request
        self.ends_at_once = False  # whether a request ends the process at once, saving nothing
        # Those of the two descriptors of standard output and error that are terminals.
        self.terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self.handlers_before: dict[int, Handler] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python receives signals in its main thread only; a notebook may run another
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            is_under_nohup = number == HANGUP and handler == signal.SIG_IGN
            if not is_under_nohup:
                self.handlers_before[number] = handler
                signal.signal(number, self.receive if acts_on_signals else signal.SIG_DFL)
        if acts_on_signals and SET_BY_LAUNCHERS & {*os.environ}:
            signal.signal(PARENT_ENDED, self.receive)
            signal_when_parent_ends()
            if is_orphan():  # the launcher ended before this process asked for the signal
                self.receive(PARENT_ENDED, None)

    def release(self) -> None:
        """Give the signals back to their earlier handlers, for a notebook that goes on."""
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)
        self.handlers_before.clear()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember the first request to stop, and end the process at a second.

        The end of the launcher does not count as a second request, because launchers, too, end
        after a signal.

        Raises:
            Preempted: at the first request, if requests end the process at once.
        """
        now = time.monotonic()
        launcher_died = number == PARENT_ENDED
        if number == HANGUP:  # the terminal is gone, and printing to it would fail
            for terminal in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        if self.reason is None:
            if launcher_died:
                self.reason = "the end of its launcher"
            else:
                self.reason = STOP_SIGNAL_NAMES[number]
                self.is_by_ctrl_c = number == signal.SIGINT
            self.since = now
            if self.ends_at_once:
                self.end_at_once()
        elif not launcher_died and now - self.since > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end_at_once(self) -> None:
        """Let a request end the process at once from now on; an earlier request ends it here.

        The run calls this before data are prepared, when nothing has to be saved.

        Raises:
            Preempted: at once, if a signal has asked the process to stop.
        """
        self.ends_at_once = True
        if self.reason is not None:
            raise Preempted(
                f"stopped by {self.reason} before the first update: start the same command again",
                is_by_ctrl_c=self.is_by_ctrl_c,
            )

    def save_first(self) -> None:
        """Let the run save after a request from now on, before it ends."""
        self.ends_at_once = False


@dataclass
class StopAgreement:
    """The decisions that all ranks take together about once a second, after the same update.

    They agree on whether to stop, on whether a rank failed to write a checkpoint, and on whether
    the last checkpoint is old, by rank 0's clock.
    """

    accelerator: ShardingAccelerator
    directory: Path
    failure: Callable[[], SaveFailure | None]  # why this rank could not write its last checkpoint
    request: StopRequest
    stopping: bool = False
    every: int = 1  # updates between two checks, the same on all ranks
    asked_at: tuple[int, float] | None = None  # update and clock of the last check
    announced: bool = False  # whether a rank announced a request in the process group's store
    next_look: float = 0.0  # clock at which this rank looks into the store again
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
        failure = self.failure()
        age = time.perf_counter() - self.saved_at
        is_old = age >= CHECKPOINT_SECONDS and is_main_rank()
        flags = [self.request.reason is not None, failure is not None, is_old]
        if self.accelerator.num_processes > 1:
            flags = self.ask_all(flags, global_step)
        self.stopping, failed, self.is_checkpoint_old = flags
        if failed:
            self.raise_failure(failure)

    def raise_failure(self, failure: SaveFailure | None) -> None:
        """Raise the same `TrainingError` on all ranks, with the cause and what to do.

        Only a failure of the disk is resumable, because it may be gone when the run is started
        again.
        """
        failures_by_rank = gather_from_ranks(self.accelerator, failure)
        failures = [each for each in failures_by_rank if each is not None]
        # Rank 0 may only report that another rank failed. That rank knows the cause, so its own
        # report is preferred. If that rank is gone, only rank 0's report is known.
        own_failures = [each for each in failures if not each.is_of_other_rank]
        cause = (own_failures or failures)[0]
        if cause.is_replaced:  # there is no earlier checkpoint to go on from
            raise TrainingError(cause.message, advice=ReplacedDirectoryError.ADVICE)
        raise TrainingError(
            f"a checkpoint of {self.directory} could not be written ({cause})",
            advice=(
                f"{advice_for(cause.message, cause.error_number)}, then continue from the "
                f"checkpoint before it with --resume {quoted(self.directory)}"
            ),
            resumable=cause.is_of_disk,
        )

    def ask_all(self, flags: list[bool], global_step: int) -> list[bool]:
        """Return which flags are set on any rank; also choose the interval to the next check."""
        now = time.perf_counter()
        last_step, last_time = self.asked_at or (global_step, now)
        self.asked_at = global_step, now
        *flag_sums, seconds = sum_in_fp32(self.accelerator, [*flags, now - last_time])
        updates = global_step - last_step
        if updates > 0:
            # A check should come about once a second, so the interval is the number of updates in a
            # second. `seconds` is a sum over ranks, so the updates of all ranks are divided by it.
            updates_of_ranks = updates * self.accelerator.num_processes
            self.every = max(1, int(updates_of_ranks / max(seconds, 1e-3)))
        return [value > 0 for value in flag_sums]

    def is_announced(self) -> bool:
        """Whether any rank was asked to stop, as far as this rank knows.

        Loaders call this before each batch of an evaluation, to end it early. Ranks may have
        different numbers of batches, so there is no collective: a rank that was asked to stop
        announces it in the process group's store, and the others look there about once a second.
        With FSDP there is a collective, so all ranks must call this equally often.
        """
        is_requested = self.request.reason is not None
        if self.accelerator.mesh is not None:
            # With FSDP, all ranks call this before each batch, so a collective can ask them.
            (requests,) = sum_in_fp32(self.accelerator, [is_requested])
            return requests > 0
        if self.accelerator.num_processes > 1 and not self.stopping and not self.announced:
            self.announce_or_look(is_requested)
        return self.stopping or self.announced or is_requested

    def announce_or_look(self, is_requested: bool) -> None:
        """Announce this rank's request in the store, or look there for another rank's request.

        The store ends with the launcher. Then nothing is announced or seen, and nothing has to be:
        the end of the launcher asks each of its ranks to stop.
        """
        now = time.monotonic()
        with suppress(RuntimeError):  # the store has ended
            if is_requested:
                announce(ANNOUNCEMENT)
                self.announced = True
            elif now >= self.next_look:
                self.next_look = now + LOOK_EVERY
                self.announced = is_announced(ANNOUNCEMENT)

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
