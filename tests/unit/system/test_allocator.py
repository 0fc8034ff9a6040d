"""The C library keeps freed memory, unless the user has chosen settings for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from common.system.allocator import USER_VARIABLES, keep_freed_memory

# Prints whether the settings were made, and how many pages the kernel cleared for tensors that
# are made and freed again and again.
COUNT_CLEARED_PAGES = """
import resource, sys
import torch
from common.system.allocator import keep_freed_memory

made = sys.argv[1] == "kept" and keep_freed_memory()
for count in range(12):
    if count == 8:  # by then, the heap has its final size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(3, 2**22) for _ in range(3)]
    del tensors
print(made, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def cleared_pages(word: str, **variables: str) -> tuple[bool, int]:
    """Return what the script prints in an environment with further variables."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", COUNT_CLEARED_PAGES, word]
    printed = subprocess.check_output(command, env=environment | variables, text=True)
    made, pages = printed.split()
    return made == "True", int(pages)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_used_again() -> None:
    """Tensors of 48 MiB need new pages each time, or, with the settings, almost none."""
    made, pages = cleared_pages("kept")
    assert made
    _, pages_before = cleared_pages("returned")
    assert pages < pages_before / 10
    # The user's settings have precedence.
    made, _ = cleared_pages("kept", MALLOC_TRIM_THRESHOLD_="1000000")
    assert not made


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(USER_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
