"""The first stage of a run: from here on, `status.json` belongs to this start of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.run import Run
from tests.launch import REPOSITORY
from tests.small_run import FLAGS, run, run_until_killed
from tests.unit.recipes import config_class, status_of

pytestmark = pytest.mark.usefixtures("quick_runs")

STALE = {"status": "failed", "resumable": True, "reason": "rank 1: lost", "global_step": 0}


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
@pytest.mark.parametrize("killed_at", ["loaders", "keep", "start", "batches"])
def test_status_is_the_current_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, resume: tuple[str, ...]
) -> None:
    """A start replaces an old status at once; a mistake after a kill is not resumable."""
    (tmp_path / "status.json").write_text(json.dumps(STALE))
    flags = (*FLAGS, "--output-dir", tmp_path, *resume)
    run_until_killed(monkeypatch, Run, killed_at, *flags)
    assert status_of(tmp_path)["status"] == "running"
    assert status_of(tmp_path)["reason"] is None
    for mistake, seen in (("--larning-rate", "see its output"), ("--mixed-precision", "fp16")):
        (tmp_path / "status.json").write_text(json.dumps(STALE))
        error, _ = run(*flags, mistake, "fp16")
        assert isinstance(error, SystemExit)
        status = status_of(tmp_path)
        if resume or killed_at != "batches":  # else the status belongs to the run that exists
            assert not status["resumable"], seen
            assert seen in status["reason"]
        else:
            assert status == STALE


def test_mistake_of_another_command_says_nothing_of_a_run(tmp_path: Path) -> None:
    """A command that does not resume a run is refused, and leaves the run's status alone."""
    directory = tmp_path / "run"
    assert run(*FLAGS, "--output-dir", directory)[0] is None
    (directory / "status.json").write_text(json.dumps(STALE | {"status": "preempted"}))
    for flags in (FLAGS, (*FLAGS, "--mixed-precision", "fp16"), ("--epochs", 0)):
        error, _ = run(*flags, "--output-dir", directory)
        assert isinstance(error, UserError)
        assert status_of(directory)["status"] == "preempted"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"epochs": "three"}, r"Config\(epochs='three'\) can't be used: pass a value of type int"),
        ({"epochs": 0}, "--epochs 0 is out of range: pass a number from 1"),
        ({"batch_size": 2.5}, r"Config\(batch_size=2\.5\) can't be used"),
    ],
)
def test_flags_of_a_program_are_checked(
    flags: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program makes its Config without the command line, and leaves no run behind."""
    monkeypatch.chdir(tmp_path)
    config = config_class("mnist_mlp")(**flags)
    with pytest.raises(UserError, match=message):
        Run(config, str(REPOSITORY / "recipes" / "mnist_mlp.py"), "accuracy:max")
    assert not list(tmp_path.iterdir())
