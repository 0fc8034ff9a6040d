"""Prepares, finds and kills the worker processes of torch's loaders."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from common.data.workers.transport import prepare_worker
from common.system.allocator import HEAP
from common.system.platforms.signals import CHILD_ENDED, STOP_SIGNALS

KILL_SECONDS = 5.0  # seconds that this process waits for a killed worker to be gone


@contextmanager
def restoring_child_handler() -> Iterator[None]:
    """At the end of the block, undo the handler of SIGCHLD that torch sets when it starts workers.

    When a worker ends, that handler raises an error at any line of the main thread. It is not
    needed, because the wait for a batch notices within seconds that a worker is gone.
    """
    if CHILD_ENDED is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(CHILD_ENDED)
    try:
        yield
    finally:
        # `getsignal` returns None for a handler that was not set from Python; it can't be restored.
        signal.signal(CHILD_ENDED, handler or signal.SIG_DFL)


def new_children(earlier_children: Sequence[BaseProcess]) -> list[BaseProcess]:
    """Return the child processes that are not among `earlier_children`.

    If the earlier ones were listed just before a loader started, these are the loader's workers.
    """
    children = multiprocessing.active_children()
    return [child for child in children if child not in earlier_children]


def begin_worker(worker: int) -> None:
    """Prepare this process as a worker; torch calls it in each new worker, with its number.

    The worker ignores a stop signal that goes to the whole job: the run still needs batches until
    its last update, and then ends its workers itself.
    """
    prepare_worker()
    # A forked worker inherits the setting to keep freed memory, which it would not use again.
    HEAP.stop_keeping()
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)


def kill_workers(workers: Sequence[BaseProcess] | None = None) -> None:
    """Kill workers, and wait until they are gone.

    They would not end otherwise: workers ignore SIGTERM, and a worker may wait forever for a lock
    that another one held.

    Args:
        workers: the workers of one loader; None for those of all loaders of this process.
    """
    if workers is None:
        # Among the children of this process, torch's workers are those that are daemons.
        workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(KILL_SECONDS)
