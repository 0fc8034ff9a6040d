"""The current status of a run: its lock tells whether its job was killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from common.run_directory.status import advice_to_go_on, current_status
from common.storage.files import LOCK


def run_with(path: Path, **status: object) -> Path:
    """Write a run's directory with a status."""
    path.mkdir()
    (path / "status.json").write_text(json.dumps(status))
    return path


def test_free_lock_means_that_the_run_was_killed(tmp_path: Path) -> None:
    """The lock of a run is free after its process was killed by kill -9."""
    run = run_with(tmp_path / "run", status="running", global_step=0)
    assert current_status(run).status == "running"  # without a lock file, nobody knows
    code = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire()"
    code += "; print(1, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(run / LOCK)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        assert current_status(run).status == "running"
        job.kill()
    assert current_status(run).to_json() == {
        "status": "stopped",
        "reason": "its process ended before it could record a reason",
        "global_step": 0,
    }
    assert json.loads((run / "status.json").read_text())["status"] == "running"  # nothing written


def test_reading_the_status_leaves_the_lock_free(tmp_path: Path) -> None:
    """A job can take it at once, even if the lock file is read-only."""
    run = run_with(tmp_path / "run", status="running")
    (run / LOCK).touch(mode=0o444)
    assert current_status(run).status == "stopped"
    with FileLock(run / LOCK, timeout=0):
        assert current_status(run).status == "running"


@pytest.mark.parametrize(
    ("status", "has_config", "message"),
    [
        ({"status": "preempted", "resumable": True}, True, "continue its training with --resume"),
        ({"status": "failed", "resumable": True}, True, "continue its training with --resume"),
        (
            {"status": "failed", "resumable": False, "reason": "NaN"},
            True,
            r"fail \(NaN\), and then continue its training with --resume \S+, unless that",
        ),
        (
            {"status": "failed", "resumable": True},
            False,
            "repeat the command that started it, because",
        ),
    ],
)
def test_advice_works(
    status: dict[str, object], has_config: bool, message: str, tmp_path: Path
) -> None:
    """The advice names `--resume` only if `--resume` is allowed."""
    run = run_with(tmp_path / "run", **status)
    if has_config:
        (run / "config.json").write_text("{}")
    assert re.search(message, advice_to_go_on(run))
