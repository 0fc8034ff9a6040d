"""Runs that tests of stops and resumptions are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import MLP
from tests.launch import Finished, Runner


@pytest.fixture(scope="session")
def unbroken(runner: Runner) -> Finished:
    """The run that nothing stops."""
    return runner.shared("mnist_mlp", *MLP)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a run that the test stops."""
    return tmp_path / "run"
