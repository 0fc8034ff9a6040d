"""The environment in `config.json`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.track import facts
from tests.git_repository import commit_all, git


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


def test_commit_is_that_of_this_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hook of git sets `GIT_DIR`, which names the repository of the hook."""
    commits = []
    for name in ("library", "hook"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "file").write_text(name)
        commits.append(commit_all(folder))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "hook" / ".git"))
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "library" / "facts.py"))
    assert facts.git_commit() == commits[0]


def test_repository_without_a_commit_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There, `git rev-parse HEAD` fails and prints "HEAD"."""
    git(tmp_path, "init", "--quiet")
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "facts.py"))
    assert facts.git_commit() is None
