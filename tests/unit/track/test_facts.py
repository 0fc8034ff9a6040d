"""The environment in `config.json`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.track import facts


def test_versions_leave_out_packages_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run with `--tracker none` needs no wandb, and one on synthetic data no datasets."""
    monkeypatch.setattr(facts, "PACKAGES", ("torch", "a-package-that-nobody-has"))
    config: Any = SimpleNamespace(batch_size=8, gradient_accumulation_steps=2, deterministic=False)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, mesh=None, mixed_precision="no"
    )
    environment = facts.environment(config, accelerator, "device")
    assert environment.versions == {"torch": torch.__version__}
    assert environment.effective_batch_size == 32
