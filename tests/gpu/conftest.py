"""Fixtures of the tests that need a GPU; without one they are skipped.

pytest -o addopts= --confcutdir=tests/gpu tests/gpu

`tests/conftest.py` hides GPUs from its process, so these tests must neither load nor import it.
With GPU_TESTS_ANYWHERE=1 they run on a CPU, to try the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.training.precision import choose_precision
from tests.gpu.launching import Launcher
from tests.local_data import write_odd_text

HAS_GPU = torch.cuda.is_available()
DEVICE_TYPE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip if there is no GPU; keep decoded and tokenised data in the test's own folder."""
    if not HAS_GPU and "GPU_TESTS_ANYWHERE" not in os.environ:
        pytest.skip("no CUDA GPU, or hidden by tests/conftest.py: see tests/gpu/conftest.py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def half() -> str:
    """The 16-bit precision of this machine, or fp32 if it has none."""
    return choose_precision("auto", not HAS_GPU)


@pytest.fixture
def small(tmp_path: Path) -> Callable[[str], dict[str, object]]:
    """Return, by recipe, fields of its `Config` for small data; nothing is downloaded."""

    def settings(recipe: str) -> dict[str, object]:
        if recipe == "bert":
            folder = tmp_path / "text"
            folder.mkdir(exist_ok=True)
            return {"dataset": str(write_odd_text(folder)), "model": "scratch", "batch_size": 8}
        size = {} if recipe == "mnist_mlp" else {"image_size": 32}
        return {"dataset": "synthetic", "batch_size": 64, **size}

    return settings


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Runs scripts in processes of their own, on the tested device."""
    return Launcher(tmp_path, DEVICE_TYPE)


def as_flags(settings: dict[str, object]) -> list[object]:
    """Return fields of a `Config` as words of a command line."""
    pairs = settings.items()
    return [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", value)]
