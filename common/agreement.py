"""What all ranks decide together: whether to stop, and whether every one of them could save."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from common.errors import LETTING_GO
from common.failures import TrainingError
from common.signals import StopRequest

if TYPE_CHECKING:
    from pathlib import Path

    from common.checkpoint import Checkpoints

# Seconds between two looks at what other ranks announced, where no collective can ask them.
LOOK_EVERY = 1.0
ANNOUNCEMENT = "stop-requested"


class Agreement:
    """Asks all ranks between two updates, about once a second and at the same updates on each."""

    def __init__(
        self,
        accelerator: Accelerator,
        checkpoints: Checkpoints,
        directory: Path,
        heeds_signals: bool = True,
    ) -> None:
        self.accelerator = accelerator
        self.checkpoints = checkpoints
        self.directory = directory  # of the run, to be named where it can go on
        self.stop_request = StopRequest(heeds_signals)
        self.stopping = False
        self.every = 1  # updates from one question to the next, the same on all ranks
        self.asked_at: tuple[int, float] | None = None  # the last time: update and clock
        self.announced = False  # by any rank, where no collective could ask
        self.next_look = 0.0

    @property
    def reason(self) -> str:
        """Why the run was asked to stop."""
        return self.stop_request.reason or "a signal to another rank"

    def check(self, global_step: int) -> None:
        """Let all ranks agree on whether one was asked to stop, or could not save.

        Raises:
            TrainingError: on all ranks, when a checkpoint could not be written.
        """
        failure = self.checkpoints.failure
        flags = [self.stop_request.is_made, failure is not None]
        if self.accelerator.num_processes > 1:
            flags = self.ask_all(flags, global_step)
        self.stopping = flags[0]
        if flags[1]:
            raise TrainingError(
                f"a checkpoint could not be written ({failure or 'on another rank'}): free some "
                f"space, then go on from the one before with --resume {self.directory}",
                every_rank=failure is not None,
            )

    def ask_all(self, flags: list[bool], global_step: int) -> list[bool]:
        """Return which flags are set on any rank; and settle the update to ask at next."""
        now = time.perf_counter()
        last_step, last_time = self.asked_at or (global_step, now)
        self.asked_at = global_step, now
        mine = torch.tensor([*flags, now - last_time], device=self.accelerator.device)
        *sums, seconds = self.accelerator.reduce(mine, "sum").tolist()
        if global_step > last_step:
            updates_per_second = (
                (global_step - last_step) * self.accelerator.num_processes / seconds
            )
            self.every = max(1, int(updates_per_second))
        return [value > 0 for value in sums]

    def is_announced(self) -> bool:
        """Whether any rank was asked to stop, as far as one can know without a collective.

        For evaluations, of which ranks may have different numbers of batches: a rank that was
        asked leaves a word in the process group's store, and the others look there.
        """
        if self.stopping or self.announced or self.accelerator.num_processes == 1:
            return self.stopping or self.announced or self.stop_request.is_made
        store = torch.distributed.distributed_c10d._get_default_store()
        if self.stop_request.is_made:
            store.set(ANNOUNCEMENT, "")
            self.announced = True
        elif (now := time.monotonic()) >= self.next_look:
            self.next_look = now + LOOK_EVERY
            self.announced = store.check([ANNOUNCEMENT])
        return self.announced

    def end_collectives(self) -> None:
        """Let the last collective be forgotten before a process can exit.

        A thread of gloo (torch 2.13) that drops the last reference to a reduced tensor while
        the interpreter exits aborts the process. A barrier holds no tensor, and outlives those
        but for the moment in which another thread lets go of its own.
        """
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()
            if self.accelerator.device.type == "cpu":
                time.sleep(LETTING_GO)
