"""What a process may use: cores, memory, open files, and forks for its workers."""

import contextlib
import multiprocessing
import os
from types import ModuleType

from common.system.platforms import current

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows does not have it
    resource = None


def usable_cores() -> int:
    """Return the number of cores that this process may use, or of all cores if that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Return how many threads wanted a core in the last minute, on average."""
    import psutil

    return psutil.getloadavg()[0]  # on Windows, the average begins with the first call


def can_fork_with_threads() -> bool:
    """Whether a process that has threads may fork, which only Linux allows."""
    return current.IS_LINUX and hasattr(os, "fork")


def can_limit_own_memory() -> bool:
    """Whether RLIMIT_DATA limits the memory that this process allocates; on Linux alone it does."""
    return current.IS_LINUX


def worker_start_method() -> str:
    """Return the method of `multiprocessing` that starts the loader's workers.

    A fork starts at once and shares the data. It is named here, because Linux's default is another
    method from Python 3.14 on. A method that the program has set is kept.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if method is not None:
        return method
    return "fork" if can_fork_with_threads() else "spawn"


def raise_descriptor_limit(few: int, enough: int) -> None:
    """If the soft limit on open files is below `few`, raise it to `enough` or as far as allowed.

    The loader's workers need this: the training process opens several files for each of them.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard or soft >= few:  # the limit can't be raised, or need not be
        return
    raised = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def descriptor_limit() -> int | None:
    """Return how many files this process may open; None if no limit is known."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int | None:
    """Return how many files this process has open; None if the system does not report it."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return None
