"""The digest of the code beside a recipe."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.run_directory import code_digest
from common.run_directory.code_digest import digest_of_code_beside

RECIPE = "train.py"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a recipe beside a library, its tools, and a module of the user that is imported."""
    library = tmp_path / "common"
    (library / "tools").mkdir(parents=True)
    (library / "run.py").write_text("x = 1\n")
    (library / "tools" / "compare.py").write_text("x = 1\n")
    (tmp_path / "my_own_layers.py").write_text("x = 1\n")
    (tmp_path / "not_imported.py").write_text("x = 1\n")
    path = tmp_path / RECIPE
    path.write_text("x = 1\n")
    monkeypatch.setattr(code_digest, "PACKAGE", library)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("my_own_layers")
    yield path
    del sys.modules["my_own_layers"]


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("common/run.py", True),
        ("common/new_module.py", True),
        ("my_own_layers.py", True),
        (RECIPE, False),  # the run keeps its text
        ("common/tools/compare.py", False),
        ("not_imported.py", False),
        ("README.md", False),
    ],
)
def test_only_code_that_trains_matters(name: str, matters: bool, recipe: Path) -> None:
    before = digest_of_code_beside(recipe)
    assert before is not None
    (recipe.parent / name).write_text("x = 2\n")
    assert (digest_of_code_beside(recipe) != before) == matters


def test_folders_do_not_matter(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clones of a repository have the same code."""
    before = digest_of_code_beside(recipe)
    moved = recipe.parent.rename(recipe.parent.with_name("moved"))
    monkeypatch.setattr(code_digest, "PACKAGE", moved / "common")
    monkeypatch.setattr(sys.modules["my_own_layers"], "__file__", str(moved / "my_own_layers.py"))
    assert digest_of_code_beside(moved / RECIPE) == before


def test_unreadable_code_has_no_digest(recipe: Path) -> None:
    (recipe.parent / "my_own_layers.py").unlink()
    assert digest_of_code_beside(recipe) is None
