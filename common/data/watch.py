"""A thread that watches a process while it waits for a batch from its loader's workers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Literal

import psutil

from common.console import warn

LOOK_EVERY = 1.0  # seconds
NOTICE_AFTER = 10.0  # seconds of one wait after which the user is told of the wait
# Why the workers were killed.
Verdict = Literal["stop requested", "no batch came", "worker gone"]


class Watch(threading.Thread):
    """Tells the user of a long wait, and ends a wait that is too long by killing the workers.

    Only a thread can end such a wait. If a worker is stopped while it hands over a file descriptor,
    the training process blocks in a system call that has no timeout.
    """

    def __init__(
        self,
        workers: Sequence[BaseProcess],
        patience: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Prepare a watch over `workers`.

        Args:
            patience: seconds that the process may wait for one batch.
            is_stopping: whether the run was asked to stop; called in this thread.
        """
        super().__init__(daemon=True, name="watch over the loader's workers")
        self.workers = workers
        self.patience = patience
        self.is_stopping = is_stopping
        self.waiting_since: float | None = None  # time.monotonic(); None while nobody waits
        self.announced: float | None = None  # `waiting_since` of the last wait announced
        self.verdict: Verdict | None = None  # None until the workers were killed
        self.were_stopped = False  # whether workers were stopped by a signal when no batch came
        self.ended = threading.Event()  # set by the loader when the watch is over

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch the calling process while it is in this context."""
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None

    def run(self) -> None:
        """Look at the wait every second, until the watch is over or the workers were killed.

        All workers are killed if one is gone, if no batch came within `patience`, or if the run was
        asked to stop. Before that, the user is told of a long wait.
        """
        while self.verdict is None and not self.ended.wait(LOOK_EVERY):
            since = self.waiting_since
            if since is None:
                continue
            waited = time.monotonic() - since
            # A batch that is ready comes sooner, even if a worker is gone or the run stops.
            is_held_up = waited > LOOK_EVERY
            if is_held_up and not all(worker.is_alive() for worker in self.workers):
                # The other workers may wait for ever for a lock that the missing worker held.
                self.end_workers("worker gone")
            elif waited > self.patience:
                self.were_stopped = bool(self.stopped_pids())
                self.end_workers("no batch came")
            elif is_held_up and self.is_stopping():
                self.end_workers("stop requested")
            elif waited > NOTICE_AFTER and since != self.announced:
                self.announced = since
                warn(
                    f"data    waiting for a batch from {self.describe()}; the run ends if no batch "
                    f"comes within {self.patience:.0f} s",
                    every_rank=True,
                )

    def end_workers(self, verdict: Verdict) -> None:
        """Kill all workers, so that the wait for a batch ends in an error; keep the reason."""
        self.verdict = verdict
        for worker in self.workers:
            worker.kill()

    def describe(self) -> str:
        """Return which workers the process waits for: stopped workers, or all if there are none."""
        stopped_pids = self.stopped_pids()
        if not stopped_pids:
            return f"the loader's workers (--num-workers {len(self.workers)})"
        pids = " ".join(stopped_pids)
        return f"workers of the loader that are stopped (kill -CONT {pids} lets them go on)"

    def stopped_pids(self) -> list[str]:
        """Return the process ids of the workers that were stopped by a signal."""
        return [str(worker.pid) for worker in self.workers if is_stopped(worker)]


def is_stopped(worker: BaseProcess) -> bool:
    """Whether a worker was stopped by a signal, as by Ctrl-Z."""
    try:
        return psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
