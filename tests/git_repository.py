"""A small git repository, for tests of what is saved of a run's code."""

from __future__ import annotations

import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.invalid")


def git(folder: Path, *words: str) -> str:
    """Run a git command in a folder, and return what it prints."""
    command = ["git", "-C", str(folder), *IDENTITY, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_all(folder: Path) -> str:
    """Make a folder a repository, commit all its files, and return the commit."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a state")
    return git(folder, "rev-parse", "HEAD")
