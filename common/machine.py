"""Which process this is of its job, and what the machine under it has."""

import os
import platform
import socket
from contextlib import suppress
from pathlib import Path

from common.platforms import usable_cores


def count_of(name: str, default: int) -> int:
    """Return a number of the launcher's; who needs one that is none refuses it by itself."""
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def rank() -> int:
    return count_of("RANK", 0)


def is_main_rank() -> bool:
    """Whether this process is the one that speaks for the job."""
    return rank() == 0


def world_size() -> int:
    return count_of("WORLD_SIZE", 1)


def local_world_size() -> int:
    return max(1, count_of("LOCAL_WORLD_SIZE", 1))


def several_machines() -> bool:
    return world_size() > local_world_size()


def name_interface() -> None:
    """Let gloo talk over the interface that the machines meet on: it might take the loopback."""
    import psutil

    if not several_machines() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((os.environ.get("MASTER_ADDR", ""), 1))  # sends nothing
        mine = asking.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if mine in (one.address for one in addresses) and not mine.startswith("127."):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def cpu_threads(asked: int | None = None) -> int:
    """Return the threads of a process: `--num-threads`, or its share of the cores.

    ``accelerate launch`` exports ``OMP_NUM_THREADS=1`` when nothing is set, which would leave
    every core but one idle, and with a file for the CPU all cores of the machine, usable or not;
    any other value is the user's and is kept.
    """
    exported = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # OpenMP takes 4,2 as well
    if asked is None and exported.isdigit() and int(exported) > 1:
        asked = min(int(exported), usable_cores())
    return asked or max(1, usable_cores() // local_world_size())


def processor_name() -> str:
    """Return the name of the processor, such as "AMD EPYC 7763 64-Core Processor"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
