"""Tools that print their result: on a closed, full or broken standard output, no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOOL = """
from common.standard_output import run_tool

def main():
    for number in range(LINES):
        print("é", number)

run_tool(main)
"""


@pytest.mark.parametrize(
    ("redirection", "lines", "status", "said"),
    [
        (">&-", 3, 1, "error: standard output is closed"),
        ("> /dev/full", 3, 1, "error: standard output can't be written (No space left on device)"),
        ("> /dev/full", 99999, 1, "error: standard output can't be written (No space left"),
        ("| head -1", 99999, -1, ""),
        ("> /dev/null", 3, 0, ""),
        ("> /dev/null <&-", 3, 0, ""),
    ],
)
def test_standard_output(redirection: str, lines: int, status: int, said: str) -> None:
    """A sentence and status 1, also where the failure shows only at the end."""
    code = TOOL.replace("LINES", str(lines))
    command = f'"$0" -c "$1" {redirection}'
    words = ["bash", "-c", command, sys.executable, code]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert answer.stderr.startswith(said)
    assert len(answer.stderr.splitlines()) == bool(said)
    if status >= 0:
        assert answer.returncode == status
    else:
        assert answer.stdout == "é 0\n"
