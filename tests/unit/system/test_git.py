"""The commit of this library's checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.system.git import commit_of_library
from tests.git_repository import commit_all, git


def test_commit_is_that_of_this_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hook of git sets `GIT_DIR`, which names the repository of the hook."""
    commits = []
    for name in ("library", "hook"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "file").write_text(name)
        commits.append(commit_all(folder))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "hook" / ".git"))
    monkeypatch.setattr("common.system.git.__file__", str(tmp_path / "library" / "git.py"))
    assert commit_of_library() == commits[0]


def test_repository_without_a_commit_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There, `git rev-parse HEAD` fails and prints "HEAD"."""
    git(tmp_path, "init", "--quiet")
    monkeypatch.setattr("common.system.git.__file__", str(tmp_path / "git.py"))
    assert commit_of_library() is None
