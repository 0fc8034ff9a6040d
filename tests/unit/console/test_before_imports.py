"""A recipe's process during its imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_ctrl_c_during_imports_gives_one_sentence() -> None:
    """Ctrl-C during imports gives one sentence without a traceback."""
    code = "import os; from common.console import begin; begin(); os.kill(os.getpid(), 2)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("stopped by Ctrl-C before the first update")
    assert "Traceback" not in ended.stderr


def test_exit_skips_garbage_collection() -> None:
    """Objects are frozen at exit, so that Python's last collection is short."""
    first = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))"
    code = f"{first}; from common.console import begin; begin()"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) > 10_000


def test_missing_current_directory_gives_one_sentence(tmp_path: Path) -> None:
    """It comes before torch is loaded, whose libraries would abort the process."""
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone');"
        "from common.console import begin; begin()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 1
    expected = "error: the current directory was removed: change to a folder that exists\n"
    assert ended.stderr == expected
