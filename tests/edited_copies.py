"""Copies of the MLP recipe in which some texts are replaced."""

from __future__ import annotations

from pathlib import Path

from tests.launch import REPOSITORY


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write a copy of the MLP recipe into a folder, and return its file.

    Args:
        changes: texts that the recipe has exactly once, and their replacements.
    """
    text = (REPOSITORY / "recipes" / "mnist_mlp.py").read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "mine.py"
    path.write_text(text)
    return path
