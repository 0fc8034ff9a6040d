"""Copies of recipes and examples in which some texts are replaced."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.edited_recipe import edited_once
from tests.launch import REPOSITORY


def edited(recipe: str | Path, folder: Path, *edits: tuple[str, str]) -> Path:
    """Write a copy of a recipe into a folder, under its name, and return its file.

    Args:
        recipe: its name, or the path of a script.
        edits: texts that the recipe has exactly once, and their replacements.
    """
    script = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
    copy = folder / script.name
    copy.write_text(edited_once(script.read_text(encoding="utf-8"), edits), encoding="utf-8")
    return copy


def with_line_before_backward(folder: Path, line: str) -> Path:
    """Write a copy of the MLP recipe with a line before its backward pass; return its file."""
    backward = "                accelerator.backward(loss)\n"
    return edited("mnist_mlp", folder, (backward, f"                {line}\n{backward}"))
