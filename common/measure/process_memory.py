"""The memory of this process, as the system counts it."""

import functools
import re
from pathlib import Path

import psutil

from common.system.platforms.limits import resource

CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return the bytes of the process's resident memory now; 0 if the system does not tell."""
    process = own_process()
    if process is not None:
        return process.memory_info().rss
    if resource is None:
        return 0
    # Without /proc only the peak is known, which takes the place of the current value.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the peak, in KiB


def process_peak() -> int:
    """Return the most bytes resident in the process since the mark was last reset.

    Linux keeps such a mark. On other systems, return what `resident_bytes` knows.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        status = ""
    marks = [1024 * int(kib) for kib in re.findall(r"VmHWM:\s+(\d+) kB", status)]
    return max([resident_bytes(), *marks])


def reset_process_peak() -> bool:
    """Reset the mark that `process_peak` reads. Return whether the system can do that."""
    try:
        # This resets Linux's high-water mark of the process; see `man 5 proc`.
        CLEAR_REFS.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def own_data_bytes() -> int:
    """Return the bytes of this process's data, including pages never touched; 0 if unknown."""
    process = own_process()
    return 0 if process is None else process.memory_info().data


@functools.cache
def own_process() -> psutil.Process | None:
    """Return psutil's object for this process, made only once; None without /proc."""
    try:
        return psutil.Process()
    except (OSError, psutil.Error):
        return None
