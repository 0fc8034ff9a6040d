"""Requests to stop: taken note of at once, agreed by all ranks, obeyed between two updates."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from common.errors import (
    LETTING_GO,
    REPLACED,
    Preempted,
    TrainingError,
    advice_for,
    is_of_disk,
)
from common.machine import STOP_SIGNALS, signal_when_parent_ends

# From the kernel: `accelerate launch` has died, which with one process tells the recipe nothing.
LAUNCHER_DIED = signal.SIGUSR2
# A terminal and a launcher may both pass on one Ctrl-C: that is not yet a second signal.
SAME_REQUEST_SECONDS = 1.0
LOOK_EVERY = 1.0  # seconds, at what other ranks announced where no collective can ask them
ANNOUNCEMENT = "stop-requested"
OTHERS_PART = "could not write its part"  # as `Checkpoints` says of another rank


class StopRequest:
    """Remembers that a signal asked this process to stop; a second one ends it at once."""

    def __init__(self, heeded: bool = True) -> None:
        """Receive signals; where nobody will heed them, they end the process as they always do."""
        self.reason: str | None = None
        self.since = 0.0
        self.at_once = False  # whether to end where the process stands, as nothing is to be saved
        self.terminals = [number for number in (1, 2) if os.isatty(number)]
        self.handlers_before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python receives signals in its main thread alone, as of a notebook
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
                self.handlers_before[number] = handler
                signal.signal(number, self.receive if heeded else signal.SIG_DFL)
        # Set by `accelerate launch`, and by torchrun.
        is_launched = {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"} & {*os.environ}
        if heeded and sys.platform == "linux" and is_launched:
            signal.signal(LAUNCHER_DIED, self.receive)
            signal_when_parent_ends(LAUNCHER_DIED)
            if is_orphan():
                self.receive(LAUNCHER_DIED, None)

    def release(self) -> None:
        """Give signals back to who received them before, as a notebook does."""
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)
        self.handlers_before.clear()

    def receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        died = number == LAUNCHER_DIED
        if number == signal.SIGHUP:  # what is said to a terminal that is gone would be an error
            for terminal in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        if self.reason is None:
            self.reason = "the end of its launcher" if died else signal.Signals(number).name
            self.since = now
            self.obey_at_once(self.at_once)
        elif not died and now - self.since > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def obey_at_once(self, at_once: bool) -> None:
        """Settle whether requests are obeyed at once, also the one that was made already."""
        self.at_once = at_once
        if at_once and self.reason is not None:
            raise Preempted(f"stopped by {self.reason} before the first update: start it again")


def is_orphan() -> bool:
    """Whether the launcher ended during the imports, untold: then its heir is no Python."""
    try:
        return b"python" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return True


@dataclass
class Agreement:
    """Asks all ranks between two updates, about once a second and at the same updates on each."""

    accelerator: Accelerator
    directory: Path
    failure: Callable[[], str | None]  # why this rank could not write its last checkpoint
    request: StopRequest = field(default_factory=StopRequest)
    stopping: bool = False
    every: int = 1  # updates from one question to the next, the same on all ranks
    asked_at: tuple[int, float] | None = None  # the last time: update and clock
    announced: bool = False  # by any rank, where no collective could ask
    next_look: float = 0.0

    def check(self, global_step: int) -> None:
        """Let all ranks agree on whether one was asked to stop; raise if one could not save."""
        failure = self.failure()
        flags = [self.request.reason is not None, failure is not None]
        if self.accelerator.num_processes > 1:
            flags = self.ask_all(flags, global_step)
        self.stopping, failed = flags
        if failed:
            self.raise_failure(failure)

    def raise_failure(self, failure: str | None) -> None:
        """Raise the same `TrainingError` on all ranks: what kept one from writing, and what to do.

        Only a disk that is full or fails may be better by itself, when the run is started again.
        """
        failures = [failure]
        if self.accelerator.num_processes > 1:
            failures = gather_object(failures)
        texts = [text for text in failures if text is not None]
        # Rank 0 also says that another one failed; that one says why.
        text = next((text for text in texts if OTHERS_PART not in text), texts[0])
        if REPLACED in text:  # there is no checkpoint before this one to go on from
            raise TrainingError(text)
        advice = f"{advice_for(text)}, then go on from the one before with"
        raise TrainingError(
            f"a checkpoint could not be written ({text}): {advice} --resume {self.directory}",
            resumable=is_of_disk(OSError(text)),
        )

    def ask_all(self, flags: list[bool], global_step: int) -> list[bool]:
        """Return which flags are set on any rank; and settle the update to ask at next."""
        now = time.perf_counter()
        last_step, last_time = self.asked_at or (global_step, now)
        self.asked_at = global_step, now
        mine = torch.tensor([*flags, now - last_time], device=self.accelerator.device)
        *sums, seconds = self.accelerator.reduce(mine, "sum").tolist()
        if (updates := global_step - last_step) > 0:
            self.every = max(1, int(updates * self.accelerator.num_processes / seconds))
        return [value > 0 for value in sums]

    def is_announced(self) -> bool:
        """Whether any rank was asked to stop: one that was tells in the process group's store."""
        requested = self.request.reason is not None
        if getattr(self.accelerator, "mesh", None) is not None:  # all ranks ask before each batch
            flag = torch.tensor(float(requested), device=self.accelerator.device)
            return bool(self.accelerator.reduce(flag, "sum") > 0)
        if self.accelerator.num_processes > 1 and not self.stopping and not self.announced:
            store = torch.distributed.distributed_c10d._get_default_store()
            if requested:
                store.set(ANNOUNCEMENT, "")
                self.announced = True
            elif (now := time.monotonic()) >= self.next_look:
                self.next_look = now + LOOK_EVERY
                self.announced = store.check([ANNOUNCEMENT])
        return self.stopping or self.announced or requested

    def stop(self, global_step: int) -> None:
        """End this process by `Preempted`, with everything saved; called on all ranks."""
        self.check(global_step)
        end_collectives(self.accelerator)
        reason = self.request.reason or "a signal to another rank"
        what = f"stopped after update {global_step} by {reason}; everything is saved"
        raise Preempted(f"{what}: go on with --resume {self.directory}")


def end_collectives(accelerator: Accelerator) -> None:
    """Let the last collective be forgotten before a process can exit.

    A thread of gloo (torch 2.13) that drops the last reference to a reduced tensor while the
    interpreter exits aborts the process. A barrier holds none, and outlives those by a moment.
    """
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        if accelerator.device.type == "cpu":
            time.sleep(LETTING_GO)
