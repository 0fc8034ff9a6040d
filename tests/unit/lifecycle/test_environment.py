"""The environment in `config.json`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.lifecycle.start import environment
from common.lifecycle.start.environment import current_environment


def test_versions_leave_out_packages_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run with `--tracker none` needs no wandb, and one on synthetic data no datasets."""
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "a-package-that-nobody-has"))
    config: Any = SimpleNamespace(batch_size=8, gradient_accumulation_steps=2, deterministic=False)
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, mesh=None, mixed_precision="no"
    )
    current = current_environment(config, accelerator, "device", Path(__file__))
    assert current.versions == {"torch": torch.__version__}
    assert current.effective_batch_size == 32
