"""Fixtures for all tests of data."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from common.data.workers.processes import kill_workers
from common.system.platforms.signals import CHILD_ENDED


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test caches of its own: ours, and the Hub's, where other tests put data sets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(autouse=True)
def _no_workers_left() -> Iterator[None]:
    """Kill the workers that a test leaves, as a run does when an error ends it.

    Otherwise torch waits 10 s for each of them when Python happens to collect its loader. A test
    that uses torch's own loader leaves torch's handler, which raises an error for a killed worker.
    """
    yield
    if CHILD_ENDED is not None:
        signal.signal(CHILD_ENDED, signal.SIG_DFL)
    kill_workers()
