"""A thread that watches a process while it waits for a batch from its loader's workers.

It tells the user of a long wait, and ends a wait that is too long. The limit is set in
`common.data.run_loaders`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Literal

import psutil

from common.console import warn

LOOK_EVERY = 1.0  # seconds between two looks at the wait and the workers
NOTICE_AFTER = 10.0  # seconds of one wait after which the user is told of the wait
# Why the workers were killed.
KillReason = Literal["stop requested", "no batch came", "worker gone"]


@dataclass(frozen=True)
class WorkerNames:
    """How messages name workers, and the flags that have to do with them."""

    name: str  # such as "the loader's workers"
    count_flag: str | None = None  # the flag that sets how many there are
    timeout_flag: str | None = None  # the flag that sets how long a process waits for them


LOADER_NAMES = WorkerNames("the loader's workers", "--num-workers", "--collective-timeout")


class Watch(threading.Thread):
    """Tells the user of a long wait for a batch, and ends a wait that is too long.

    It ends the wait by killing the workers. Only a separate thread can do so in every case: if a
    worker is stopped while it hands over a file descriptor, the main thread blocks in a system call
    without a timeout.
    """

    def __init__(
        self,
        workers: Sequence[BaseProcess],
        timeout: float,
        is_stopping: Callable[[], bool],
        names: WorkerNames = LOADER_NAMES,
    ) -> None:
        """Prepare a watch over `workers`; `start` begins it.

        Args:
            timeout: seconds that the process may wait for one batch.
            is_stopping: tells whether the run was asked to stop; the watching thread calls it.
            names: how messages name the workers and their flags.
        """
        super().__init__(daemon=True, name="watch over the loader's workers")
        self.names = names
        self.workers = workers
        self.timeout = timeout
        self.is_stopping = is_stopping
        self.waiting_since: float | None = None  # time.monotonic(); None while nobody waits
        # The start of the last wait that was reported; each wait is reported only once.
        self.reported_wait: float | None = None
        self.kill_reason: KillReason | None = None  # None until the workers are killed
        # Whether workers were suspended (SIGSTOP) when this thread killed all for want of a batch.
        self.were_stopped = False
        self.ended = threading.Event()  # set by the loader when the watch is over

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch this thread's wait for a batch, which is the block."""
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None

    def run(self) -> None:
        """Look at the wait every second, until the watch is over or the workers are killed.

        All workers are killed if no batch comes within `timeout`. They are killed sooner, after a
        wait of a second, if one of them is gone or the run was asked to stop. Otherwise, the user
        is told once of a wait of more than `NOTICE_AFTER` seconds.
        """
        while self.kill_reason is None and not self.ended.wait(LOOK_EVERY):
            since = self.waiting_since
            if since is None:
                continue
            waited = time.monotonic() - since
            reason = self.reason_to_kill(waited)
            if reason is not None:
                self.end_workers(reason)
            elif waited > NOTICE_AFTER and since != self.reported_wait:
                self.reported_wait = since
                warn(
                    f"data    waiting for {self.awaited_workers()}; the run ends if nothing comes "
                    f"from them within {self.timeout:.0f} s",
                    every_rank=True,
                )

    def reason_to_kill(self, waited: float) -> KillReason | None:
        """Return why the workers are to be killed after a wait of some seconds; None if not yet."""
        # A batch that is ready arrives within a second. It is still used if a worker is gone or the
        # run stops, so only a longer wait is ended.
        is_held_up = waited > LOOK_EVERY
        if is_held_up and not all(worker.is_alive() for worker in self.workers):
            # The other workers may wait forever for a lock that the missing worker held.
            return "worker gone"
        if waited > self.timeout:
            return "no batch came"
        if is_held_up and self.is_stopping():
            return "stop requested"
        return None

    def end_workers(self, reason: KillReason) -> None:
        """Kill all workers, so that the wait for a batch ends in an error, and note the reason."""
        if reason == "no batch came":
            self.were_stopped = bool(self.stopped_pids())
        self.kill_reason = reason
        for worker in self.workers:
            worker.kill()

    def awaited_workers(self) -> str:
        """Return the words for the workers that the process waits for, for the message.

        They are the stopped workers, or all workers if none is stopped.
        """
        stopped_pids = self.stopped_pids()
        if not stopped_pids:
            flag = self.names.count_flag
            if flag is None:
                return self.names.name
            return f"{self.names.name} ({flag} {len(self.workers)})"
        pids = " ".join(stopped_pids)
        return f"some of {self.names.name}, which are stopped (kill -CONT {pids} lets them go on)"

    def stopped_pids(self) -> list[str]:
        """Return the process ids of the workers that a signal has stopped."""
        return [str(worker.pid) for worker in self.workers if is_stopped(worker)]


def is_stopped(worker: BaseProcess) -> bool:
    """Whether a signal has stopped a worker, as Ctrl-Z does; False if the worker is gone."""
    try:
        return psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
