"""Standard streams that are closed, full or gone: at most one sentence, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOOL = (
    "from common.output.standard_streams import end_on_lost_output; end_on_lost_output()\n"
    "for number in range(20000): print('\\u2605', number)"
)
RECIPE = TOOL.replace("end_on_lost_output", "ignore_lost_output")


@pytest.mark.parametrize(
    ("redirection", "status", "sentence"),
    [
        ("> /dev/full", 1, "error: standard output can't be written (No space left on device)"),
        (">&-", 1, "error: standard output is closed"),
        ("| head -1 > /dev/null", 1, ""),
        ("> /dev/null <&-", 0, ""),
        ("> /dev/null 2>&-", 0, ""),
    ],
)
def test_tool_ends_without_a_traceback(redirection: str, status: int, sentence: str) -> None:
    """The locale is ASCII, so that some characters cannot be printed."""
    ended = run(TOOL, redirection)
    assert ended.returncode == status
    assert ended.stderr.startswith(sentence)
    assert len(ended.stderr.splitlines()) == bool(sentence)


@pytest.mark.parametrize("redirection", ["> /dev/full", ">&-", "| head -1 > /dev/null", "<&- >&-"])
def test_recipe_continues_without_its_output(redirection: str) -> None:
    """Its output matters less than its training."""
    ended = run(RECIPE, redirection)
    assert ended.returncode == 0
    assert ended.stderr == ""


def run(code: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a shell with a redirection, and return its result."""
    command = f'set -o pipefail; "{sys.executable}" -c "$CODE" {redirection}'
    environment = {"CODE": code, "LC_ALL": "C", "PYTHONUTF8": "0", "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
