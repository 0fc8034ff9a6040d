"""Fixtures for all tests of data."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test caches of its own: ours, and the Hub's, where other tests put data sets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
