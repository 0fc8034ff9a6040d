"""Requests to stop: the signals that ask this process to stop, remembered until it can obey."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from common.errors import Preempted
from common.system.platforms.process_tree import (
    PARENT_ENDED,
    WATCHES_PARENT,
    is_orphan,
    signal_when_parent_ends,
)
from common.system.platforms.signals import HANGUP, STOP_SIGNAL_NAMES, STOP_SIGNALS

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


class StopRequest:
    """Remembers that a signal asked this process to stop; a second signal ends it at once."""

    def __init__(self, acts_on_signals: bool) -> None:
        """Start to receive signals.

        Args:
            acts_on_signals: whether the run will act on a request. If not, as with
                `--evaluate-only`, which saves nothing, signals end the process as usual.
        """
        self.reason: str | None = None  # what asked this process to stop, such as "SIGTERM"
        self.is_by_ctrl_c = False
        self.requested_at = 0.0  # clock of the first request
        self.ends_at_once = False  # whether a request ends the process at once, saving nothing
        # Those of the two descriptors of standard output and error that are terminals.
        self.terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self.handlers_before: dict[int, Handler] = {}
        self.install_handlers(acts_on_signals)

    def install_handlers(self, acts_on_signals: bool) -> None:
        """Handle the signals that ask a process to stop, and the end of its parent.

        Args:
            acts_on_signals: the argument of `__init__`.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Python receives signals in its main thread only; a notebook may run another
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            is_under_nohup = number == HANGUP and handler == signal.SIG_IGN
            if not is_under_nohup:
                self.handlers_before[number] = handler
                signal.signal(number, self.receive if acts_on_signals else signal.SIG_DFL)
        if acts_on_signals and SET_BY_LAUNCHERS & {*os.environ}:
            self.handlers_before.setdefault(PARENT_ENDED, signal.getsignal(PARENT_ENDED))
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
            self.requested_at = now
            if self.ends_at_once:
                self.raise_if_requested()
        elif not launcher_died and now - self.requested_at > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end_at_once(self) -> None:
        """Let a request end the process at once from now on; an earlier request ends it here.

        The run calls this before data are prepared, when nothing has to be saved.

        Raises:
            Preempted: at once, if a signal has asked the process to stop.
        """
        self.ends_at_once = True
        self.raise_if_requested()

    def raise_if_requested(self) -> None:
        """Raise `Preempted` if a signal has asked the process to stop.

        The caller has made no update yet, so there is nothing to save.
        """
        if self.reason is not None:
            raise Preempted(
                f"stopped by {self.reason} before the first update: start the same command again",
                is_by_ctrl_c=self.is_by_ctrl_c,
            )

    def save_first(self) -> None:
        """Let the run save after a request from now on, before it ends."""
        self.ends_at_once = False
