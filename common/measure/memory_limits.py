"""How much memory a device has, and the limit that a process on a CPU sets for itself."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from common.measure.process_memory import own_data_bytes
from common.system import devices
from common.system.platforms.limits import can_limit_own_memory, resource

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def device_memory(device: torch.device) -> int:
    """Return the size of a device's memory in bytes.

    For a CPU, and for a device that doesn't report its memory, return the memory of the machine or
    the limit of the process's container, whichever is smaller.
    """
    memory = devices.memory_info(device)
    if memory is not None:
        return memory.total
    return min([total_memory(), *container_limits()])


def total_memory() -> int:
    """Return the bytes of memory that the machine has."""
    try:
        return psutil.virtual_memory().total
    except (OSError, psutil.Error):  # without /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_limits() -> list[int]:
    """Return the memory limits in bytes of the Linux control groups that this process is in.

    Slurm, systemd and container engines nest control groups, and each level may have a limit.
    """
    limits = []
    for root, path, name in own_cgroups():
        # A path begins with "/", so its first part is empty. In a container, ".." may follow: it
        # stands for levels above the container's root, which can't be read.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            try:
                limits.append(int(root.joinpath(*parts[:depth], name).read_text(encoding="utf-8")))
            except (OSError, ValueError):  # the level is hidden, or its limit is "max"
                continue
    return limits


def own_cgroups() -> Iterator[tuple[Path, str, str]]:
    """Yield the control groups of this process.

    Yields:
        The folder where groups are mounted, the path of this process's group below it, and the name
        of the file with a group's memory limit.
    """
    try:
        lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        # Without /proc, the groups at the root of both versions are the only ones known.
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        # A line is ID:CONTROLLERS:PATH. Only version 2 has no controllers there.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield CGROUPS, path, "memory.max"
            yield CGROUPS / "unified", path, "memory.max"  # if version 1 is mounted as well
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory", path, "memory.limit_in_bytes"


def limit_memory() -> None:
    """Limit this process to the memory that exists, on Linux.

    An allocation beyond that fails with an error, which a message can explain. Without the limit,
    Linux would kill the process.
    """
    if can_limit_own_memory() and resource is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        # The size of the process's current data is added, because most of these data are stacks of
        # threads, which are never touched and take no memory.
        limit = own_data_bytes() + device_memory(torch.device("cpu"))
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def lift_limit() -> None:
    """Undo `limit_memory`, so that a run that met the limit can still write its files and end."""
    if can_limit_own_memory() and resource is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))
