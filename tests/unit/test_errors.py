"""Errors that end a run: which rank prints them, and what the modules of errors import."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from common.errors import TrainingError, UserError
from tests.launch import REPOSITORY


def test_only_rank_0_prints_a_common_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that a single rank meets is printed by that rank."""
    assert UserError("wrong").code == "error: wrong"
    monkeypatch.setenv("RANK", "1")
    assert UserError("wrong").code == 1
    assert UserError("wrong").message == "wrong"
    assert UserError("wrong", every_rank=True).code == "error: wrong"


def test_modules_for_reading_runs_import_no_torch() -> None:
    """A comparison needs them, and starts quickly."""
    packages = ("failures", "storage", "output")
    paths = [
        path for package in packages for path in (REPOSITORY / "common" / package).glob("*.py")
    ]
    modules = [f"{path.parent.name}.{path.stem}" for path in paths if path.stem != "__init__"]
    modules.remove("storage.value_digests")  # computes digests of tensors
    modules += ["errors", "metric_names", "flags", "objective", "console"]
    assert len(modules) > 10
    imports = "; ".join(f"import common.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("every_rank", [False, True])
def test_pickled_error_keeps_its_message(
    rank: int, every_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of any rank sends its error to the run, which then knows what to say."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = TrainingError("it fails", advice="go on", every_rank=every_rank, resumable=True)
    received = pickle.loads(pickle.dumps(error))
    assert isinstance(received, UserError)
    assert received.message == error.message
    assert received.advice == "go on"
    assert received.resumable
    assert received.code == error.code
