"""A thread that looks after a process that waits for a batch of its loader's workers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Literal

import psutil

from common.console import warn

LOOK_EVERY = 1.0  # seconds
NOTICE_AFTER = 10.0  # seconds without a batch, after which the user is told
Verdict = Literal["stop requested", "no batch came", "worker gone"]


class Watch(threading.Thread):
    """Tells whom a process waits for, and ends the wait by ending the workers.

    A thread has to do that. A worker that is stopped while it hands over a file descriptor blocks
    the process that trains in a call to the system, which knows no limit of time.
    """

    def __init__(
        self,
        workers: Sequence[BaseProcess],
        patience: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Look after `workers`, for whose batch the process waits `patience` seconds at most."""
        super().__init__(daemon=True, name="watch over the loader's workers")
        self.workers, self.patience, self.is_stopping = workers, patience, is_stopping
        self.waiting_since: float | None = None  # time.monotonic()
        self.announced: float | None = None  # the wait that the user was told of
        # Why the workers were ended, if they were.
        self.verdict: Verdict | None = None
        self.reason = ""  # whom the process waited for
        self.ended = threading.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Look after the calling process meanwhile."""
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None

    def run(self) -> None:
        while self.verdict is None and not self.ended.wait(LOOK_EVERY):
            since = self.waiting_since
            if since is None:
                continue
            waited = time.monotonic() - since
            if waited > LOOK_EVERY and not all(worker.is_alive() for worker in self.workers):
                # This process may wait for another worker, which waits for what that one held.
                self.end_workers("worker gone")
            elif waited > self.patience:
                self.reason = self.describe()
                self.end_workers("no batch came")
            elif waited > LOOK_EVERY and self.is_stopping():
                self.end_workers("stop requested")
            elif waited > NOTICE_AFTER and since != self.announced:
                self.announced = since
                limit = f"the run ends after {self.patience:.0f} s of that"
                warn(
                    f"data    waiting for a batch from {self.describe()}; {limit}", every_rank=True
                )

    def end_workers(self, verdict: Verdict) -> None:
        self.verdict = verdict
        for worker in self.workers:
            worker.kill()

    def describe(self) -> str:
        """Return which workers are waited for, and which of them are stopped."""
        stopped = [str(worker.pid) for worker in self.workers if is_stopped(worker)]
        if not stopped:
            return f"the loader's workers ({len(self.workers)}, --num-workers)"
        numbers = " ".join(stopped)
        return f"workers of the loader that are stopped (kill -CONT {numbers} lets them go on)"


def is_stopped(worker: BaseProcess) -> bool:
    try:
        return psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
