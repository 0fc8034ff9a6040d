"""The C library keeps freed memory, unless the user has chosen settings for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from common.lifecycle.start.starting import keep_freed_memory
from common.system.allocator import USER_VARIABLES, Heap, is_set_by_user

PAGE = 4096  # the least number of bytes in a page
# Prints whether freed memory is kept, how many pages the kernel cleared for tensors that are made
# and freed again and again, how many MiB a tracker then finds for a tensor of 64 MiB, and how many
# pages are returned in the end.
COUNT_CLEARED_PAGES = """
import resource, sys
import torch
from common.measure.memory import MemoryTracker
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
with MemoryTracker("cpu") as memory:
    torch.ones(64, 2**18)
tensors = [torch.ones(3, 2**22) for _ in range(3)]
del tensors
kept = int(open("/proc/self/statm").read().split()[1])
HEAP.stop_keeping()
left = int(open("/proc/self/statm").read().split()[1])
print(is_kept, pages, memory.delta_mib, kept - left)
"""


class Printed(NamedTuple):
    """What the script printed."""

    is_kept: bool
    cleared: int
    tracked_mib: float
    returned: int


def run_script(word: str) -> Printed:
    """Run the script in an environment that leaves the choice to the code under test."""
    ignored = {*USER_VARIABLES, "GLIBC_TUNABLES"}
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    command = [sys.executable, "-c", COUNT_CLEARED_PAGES, word]
    printed = subprocess.check_output(command, env=environment, text=True)
    is_kept, cleared, tracked_mib, returned = printed.split()
    return Printed(is_kept == "True", int(cleared), float(tracked_mib), int(returned))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_used_again() -> None:
    """Tensors of 48 MiB need new pages each time, or, with the settings, almost none."""
    kept = run_script("kept")
    returned = run_script("returned")
    assert kept.is_kept
    assert not returned.is_kept
    assert kept.cleared < returned.cleared / 10
    # Even where a tensor needs no new pages, a tracker counts it.
    assert kept.tracked_mib == pytest.approx(64, abs=8)
    assert kept.returned * PAGE > 0.9 * 3 * 48 * 2**20  # after the end of the run, in a notebook


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, True),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=9:glibc.malloc.mmap_max=9"}, True),
    ],
)
def test_settings_of_the_user_have_precedence(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only settings that concern free memory count."""
    for name in (*USER_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_set_by_user() == expected
    heap = Heap()
    heap.library = SimpleNamespace(mallopt=lambda parameter, value: 1)  # type: ignore[assignment]
    heap.keep()
    assert heap.is_kept != expected


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
    monkeypatch.setattr("common.lifecycle.start.starting.HEAP", heap)
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
