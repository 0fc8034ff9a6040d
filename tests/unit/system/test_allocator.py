"""The C library keeps freed memory, unless the user has chosen settings for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common.lifecycle.starting import keep_freed_memory
from common.system.allocator import USER_VARIABLES, Heap

PAGE = 4096  # the least number of bytes in a page
# Prints whether freed memory is kept, how many pages the kernel cleared for tensors that are made
# and freed again and again, and how many pages are returned in the end.
COUNT_CLEARED_PAGES = """
import resource, sys
import torch
from common.system.allocator import HEAP

if sys.argv[1] == "kept":
    HEAP.keep()
is_kept = HEAP.is_kept
for count in range(12):
    if count == 8:  # by then, the heap has its final size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(3, 2**22) for _ in range(3)]
    del tensors
pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = int(open("/proc/self/statm").read().split()[1])
HEAP.stop_keeping()
left = int(open("/proc/self/statm").read().split()[1])
print(is_kept, pages, kept - left)
"""

# Prints how many MiB a tracker finds, after a larger tensor has left free memory behind.
TRACK_A_TENSOR = """
import torch
from common.measure.memory import MemoryTracker
from common.system.allocator import HEAP

HEAP.keep()
torch.ones(128, 2**18)
with MemoryTracker("cpu") as memory:
    torch.ones(64, 2**18)
print(HEAP.is_kept, memory.delta_mib)
"""


def run_script(word: str, **variables: str) -> tuple[bool, int, int]:
    """Run the script in an environment with further variables, and return what it prints."""
    ignored = {*USER_VARIABLES, "GLIBC_TUNABLES"}
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    command = [sys.executable, "-c", COUNT_CLEARED_PAGES, word]
    printed = subprocess.check_output(command, env=environment | variables, text=True)
    is_kept, cleared, returned = printed.split()
    return is_kept == "True", int(cleared), int(returned)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_used_again() -> None:
    """Tensors of 48 MiB need new pages each time, or, with the settings, almost none."""
    is_kept, cleared, returned = run_script("kept")
    assert is_kept
    _, cleared_before, _ = run_script("returned")
    assert cleared < cleared_before / 10
    assert returned * PAGE > 3 * 48 * 2**20  # after the end of the run, in a notebook
    # The user's settings have precedence, but only those that concern free memory.
    for settings in (
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512:glibc.malloc.mmap_max=9"},
    ):
        is_kept, _, _ = run_script("kept", **settings)
        assert not is_kept, settings
    other = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}
    is_kept, _, _ = run_script("kept", **other)
    assert is_kept


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_tracker_sees_tensors_in_memory_that_was_kept() -> None:
    printed = subprocess.check_output([sys.executable, "-c", TRACK_A_TENSOR], text=True)
    is_kept, delta_mib = printed.split()
    assert is_kept == "True"
    assert float(delta_mib) == pytest.approx(64, abs=8)


@pytest.mark.parametrize(
    ("device", "share", "processes", "is_kept"),
    [("cpu", 0.5, 1, True), ("cpu", 0.3, 2, False), ("cpu", 0.2, 2, True), ("cuda", 0.1, 1, False)],
)
def test_memory_is_kept_where_there_is_room(
    device: str, share: float, processes: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans of all processes on the machine must leave half of its memory."""
    heap = Heap()
    heap.library = SimpleNamespace(mallopt=lambda parameter, value: 1)  # type: ignore[assignment]
    monkeypatch.setattr("common.lifecycle.starting.HEAP", heap)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    keep_freed_memory(torch.device(device), share)
    assert heap.is_kept == is_kept


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*USER_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    heap = Heap()
    heap.keep()
    heap.trim()
    heap.stop_keeping()
    assert not heap.is_kept
