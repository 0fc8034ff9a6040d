"""The processor: its name and kind, and how many threads and cores a process takes."""

import os
import platform
from pathlib import Path

from common.system.launch_variables import local_world_size
from common.system.platforms.limits import usable_cores


def cpu_threads(requested: int | None = None) -> int:
    """Return how many threads this process should use.

    The number is `requested` (`--num-threads`), or else OMP_NUM_THREADS, or else this process's
    share of the usable cores. OMP_NUM_THREADS may be from ``accelerate launch`` and not from the
    user, so it does not always count:

    - By default the launcher exports 1, which would leave all cores but one idle. So 1 is ignored.
    - With a configuration file for CPUs, the launcher exports the number of all cores of the
      machine. So the value is limited to the usable cores.
    """
    # OpenMP also takes a list, such as 4,2: a number for each level of nested threads.
    exported = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if requested is None and exported.isdigit() and int(exported) > 1:
        requested = min(int(exported), usable_cores())
    return requested or cores_per_process()


def cores_per_process() -> int:
    """Return this process's share of the usable cores, at least 1."""
    return max(1, usable_cores() // local_world_size())


def processor_name() -> str:
    """Return the name of the processor, such as "AMD EPYC 7763 64-Core Processor"."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def processor_kind(capability: str) -> str:
    """Return the processor's name, family, model and best instructions.

    An example is "AMD EPYC, family 25, model 1, AVX2". A run records it, because speed and the last
    bits of results depend on it. The name alone is not enough, because a virtual machine may hide
    the exact one: quite different processors are then called "AMD EPYC". Family and model are known
    on Linux only.

    Args:
        capability: the instructions that torch's kernels use, such as "AVX2" or "AVX512".
    """
    info = cpu_info()
    parts = [processor_name()]
    if "cpu family" in info and "model" in info:
        parts += [f"family {info['cpu family']}", f"model {info['model']}"]
    instructions = capability
    if capability.startswith("AVX512"):
        features = info.get("flags", "").split()
        extensions = {"avx512_bf16": "-BF16", "amx_bf16": " with AMX-BF16"}
        instructions += "".join(name for flag, name in extensions.items() if flag in features)
    return ", ".join([*parts, instructions])


def cpu_info() -> dict[str, str]:
    """Return the names and values that Linux lists for the first processor; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    info: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        info[name.strip()] = value.strip()
    return info
