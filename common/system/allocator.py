"""What the C library does with memory that a CPU's tensors have freed."""

import ctypes
import os

# Parameters of glibc's `mallopt`; see `man 3 mallopt`.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
MAX_MAPPINGS = -4
NEVER = -1
# glibc raises its two thresholds to these values by itself once it has freed a tensor of 32 MiB,
# unless a program has set one of them.
USUAL_MMAP_THRESHOLD = 32 * 2**20
USUAL_TRIM_THRESHOLD = 64 * 2**20
USUAL_MAX_MAPPINGS = 65536
# Users set the same parameters with these variables.
USER_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")


class Heap:
    """The heap from which torch takes a CPU's tensors. There is one in a process.

    By default, glibc maps each tensor of more than 32 MiB separately and unmaps it when it is
    freed, and it also returns free memory at the end of its heap. So in each update, the kernel has
    to clear the same pages again.

    With any other C library than glibc, the methods do nothing.
    """

    def __init__(self) -> None:
        self.is_kept = False  # whether freed memory stays with the process
        self.library = glibc()

    def keep(self) -> None:
        """Keep freed memory from now on, unless the user has made settings in the environment."""
        if self.library is None or any(name.startswith(USER_VARIABLES) for name in os.environ):
            return
        mallopt = self.library.mallopt
        self.is_kept = bool(mallopt(MAX_MAPPINGS, 0) and mallopt(TRIM_THRESHOLD, NEVER))

    def trim(self) -> None:
        """Return the free memory that has been kept. A fork, for example, would copy it."""
        if self.library is not None and self.is_kept:
            self.library.malloc_trim(0)

    def stop_keeping(self) -> None:
        """Undo `keep`, and return the free memory."""
        if self.library is not None and self.is_kept:
            self.library.mallopt(MMAP_THRESHOLD, USUAL_MMAP_THRESHOLD)
            self.library.mallopt(TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)
            self.library.mallopt(MAX_MAPPINGS, USUAL_MAX_MAPPINGS)
            self.trim()
            self.is_kept = False


def glibc() -> ctypes.CDLL | None:
    """Return the process's C library if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # a TypeError on Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


HEAP = Heap()
