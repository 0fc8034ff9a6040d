"""The warning that memory keeps rising from one log line to the next."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch

from common.console import warn
from common.measure.memory import MEBIBYTE, memory_now
from common.system.devices import has_own_memory_figures

# A warning needs memory that rises over this many successive log lines. As many log lines at the
# beginning are ignored, while libraries fill their caches.
RISING_LINES = 10
MIN_RISE = 0.05  # the relative rise over these log lines that a warning needs


class RisingMemoryWatch:
    """Watches the memory of the process and the GPU, and warns once for each that keeps rising."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes_by_owner: dict[str, deque[float]] = {}  # MiB at the last log lines
        self.owners_warned_of: set[str] = set()

    def warn_if_rising(self, host_mib: float) -> None:
        """Note the memory at a log line, and warn if it has kept rising.

        Args:
            host_mib: the memory of the process, in MiB.
        """
        memory = {"the process": host_mib}  # MiB by owner
        if has_own_memory_figures(self.device):
            memory["the GPU"] = memory_now(self.device) / MEBIBYTE
        for owner, size in memory.items():
            if owner in self.owners_warned_of:
                continue
            sizes = self.sizes_by_owner.setdefault(owner, deque(maxlen=2 * RISING_LINES))
            sizes.append(size)
            # The slice skips the first lines of a run, while libraries fill their caches. Once the
            # deque is full, the slice is its newer half.
            sentence = warning_of_rise(owner, [*sizes][RISING_LINES:])
            if sentence:
                self.owners_warned_of.add(owner)
                warn(sentence)


def warning_of_rise(owner: str, sizes: Sequence[float]) -> str | None:
    """Return a warning if memory, in MiB at successive log lines, keeps rising; else None."""
    is_rising = all(later > earlier for earlier, later in pairwise(sizes))
    if len(sizes) < RISING_LINES or not is_rising or sizes[-1] < (1 + MIN_RISE) * sizes[0]:
        return None
    return (
        f"the memory of {owner} rose over {RISING_LINES} log lines in a row, from "
        f"{sizes[0]:,.0f} to {sizes[-1]:,.0f} MiB: look for tensors that are kept from each "
        "update, such as a loss that was not detached (mapped files count too, while they are read "
        "for the first time)"
    )
