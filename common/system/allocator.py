"""Keeps the memory that a CPU's tensors have freed in the process, or returns it to the system."""

import ctypes
import os

# Parameters of glibc's `mallopt`; see `man 3 mallopt`.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
MAX_MAPPINGS = -4
NEVER = -1
# By default, glibc raises its two thresholds by itself, up to these values, as it frees large
# blocks. It no longer does so once a program has set one of them.
USUAL_MMAP_THRESHOLD = 32 * 2**20
USUAL_TRIM_THRESHOLD = 64 * 2**20
USUAL_MAX_MAPPINGS = 65536
# Users set the same parameters with these variables, or as "glibc.malloc" in GLIBC_TUNABLES.
USER_VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


class Heap:
    """The heap from which torch takes a CPU's tensors. There is one in a process.

    By default, glibc maps large tensors separately and unmaps them when they are freed: those of
    more than 32 MiB always, and smaller ones until it has raised its threshold. It also returns
    free memory at the end of its heap. So in each update, the kernel has to clear the same pages
    again. `keep` saves this time.

    With any other C library than glibc, the methods do nothing.
    """

    def __init__(self) -> None:
        self.is_kept = False  # whether freed memory stays with the process
        self.library = glibc()

    def keep(self) -> None:
        """Keep freed memory from now on, unless the user has made settings in the environment."""
        if self.library is None or is_set_by_user():
            return
        mallopt = self.library.mallopt  # returns 0 if it fails
        # With no mappings allowed, large tensors come from the heap too, which is never trimmed.
        self.is_kept = bool(mallopt(MAX_MAPPINGS, 0) and mallopt(TRIM_THRESHOLD, NEVER))

    def trim(self) -> None:
        """Give the system the free memory that has been kept, and go on keeping memory.

        A fork, for example, would copy these pages, although nobody uses them.
        """
        if self.library is not None and self.is_kept:
            self.library.malloc_trim(0)

    def stop_keeping(self) -> None:
        """Give back the free memory, and keep no more of it than glibc does after a large run.

        This is for a process that goes on after its run, such as a notebook, and for a forked
        worker, which inherits the settings. The thresholds are then fixed, because glibc has no
        call to make them adapt again.
        """
        if self.library is not None and self.is_kept:
            self.library.mallopt(MMAP_THRESHOLD, USUAL_MMAP_THRESHOLD)
            self.library.mallopt(TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)
            self.library.mallopt(MAX_MAPPINGS, USUAL_MAX_MAPPINGS)
            self.trim()
            self.is_kept = False


def is_set_by_user() -> bool:
    """Whether the environment says what glibc is to do with free memory."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in USER_VARIABLES)


def glibc() -> ctypes.CDLL | None:
    """Return the process's C library if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # a TypeError on Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


HEAP = Heap()
