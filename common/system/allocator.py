"""Settings of the C library's memory allocator, from which torch takes a CPU's tensors."""

import ctypes
import os

# Parameters of glibc's `mallopt`; see `man 3 mallopt`.
TRIM_THRESHOLD = -1
MAX_MAPPINGS = -4
NEVER = -1
# Users set the same parameters with these variables.
USER_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the C library keep memory that tensors have freed for later tensors.

    By default, glibc maps each tensor of more than 32 MiB separately and unmaps it when it is
    freed, and it also returns free memory at the end of its heap. So in each update, the kernel has
    to clear the same pages again.

    Settings that the user has made in the environment have precedence.

    Returns:
        Whether the settings were made. Only glibc has them.
    """
    if any(name.startswith(USER_VARIABLES) for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 (other C libraries lack this function)
        mallopt = library.mallopt
    except (OSError, AttributeError, TypeError):  # a TypeError on Windows
        return False
    return bool(mallopt(MAX_MAPPINGS, 0) and mallopt(TRIM_THRESHOLD, NEVER))
