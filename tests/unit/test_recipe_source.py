"""The recipe's text: kept at the first start, told and listed where another one takes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from common.directory import RunDirectory
from common.recipe_source import MOST_LINES, RecipeSource


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run's directory."""
    PartialState(cpu=True)
    return RunDirectory(str(tmp_path / "run"), "recipe", False)


def facts_of(text: str, directory: RunDirectory, saved: dict[str, Any], step: int) -> Any:
    """Start or resume a run of a recipe with this text."""
    recipe = directory.path.parent / "recipe.py"
    recipe.write_text(text)
    return RecipeSource(recipe).facts(directory, saved, step)


def test_changes_are_told_and_listed(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first resume with the difference, at all later ones by the update."""
    first = facts_of("import torch\nF.relu(x)\n", directory, {}, 0)
    assert (directory.path / "recipe.py").read_text() == "import torch\nF.relu(x)\n"
    assert first["changes"] == []
    assert facts_of("import torch\nF.relu(x)\n", directory, first, 3) == first
    assert capsys.readouterr().out == ""
    second = facts_of("import torch\nF.tanh(x)\n", directory, first, 3)
    said = capsys.readouterr().out
    assert "-F.relu(x)" in said
    assert "+F.tanh(x)" in said
    assert "import" not in said
    assert [change["global_step"] for change in second["changes"]] == [3]
    assert facts_of("import torch\nF.tanh(x)\n", directory, second, 5) == second
    said = capsys.readouterr().out
    assert "changed at update 3" in said
    assert "+F.tanh" not in said
    back = facts_of("import torch\nF.relu(x)\n", directory, second, 7)
    assert [change["global_step"] for change in back["changes"]] == [3, 7]
    # A resume from before a change is of the text that was trained with until then.
    assert facts_of("import torch\nF.relu(x)\n", directory, back, 3) == first


CODE = '''"""What it does."""

def loss(x):
    """Of x."""
    return x - 1  # minus one
'''


@pytest.mark.parametrize(
    "text",
    [
        CODE.replace("minus one", "less"),
        CODE.replace("What it does.", "Result: 98 %."),
        CODE.replace('    """Of x."""\n', ""),
        CODE.replace("\n", "\r\n"),
        CODE + "\n\n# the end\n",
    ],
)
def test_comments_are_no_change(
    text: str, directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are docstrings and line ends; the code beside them is."""
    first = facts_of(CODE, directory, {}, 0)
    assert facts_of(text, directory, first, 3) == first
    assert capsys.readouterr().out == ""
    changed = facts_of(text.replace("x - 1", "x + 1"), directory, first, 3)
    assert [change["global_step"] for change in changed["changes"]] == [3]
    assert "x + 1" in capsys.readouterr().out


def test_text_that_is_no_python_is_compared_as_it_is(directory: RunDirectory) -> None:
    first = facts_of("a b", directory, {}, 0)
    assert len(facts_of("a b # c", directory, first, 3)["changes"]) == 1


def test_long_differences_are_cut(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file to compare with is named."""
    first = facts_of("", directory, {}, 0)
    facts_of("".join(f"line {number}\n" for number in range(999)), directory, first, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_LINES + 2
    assert str(directory.path / "recipe.py") in lines[-1]


def test_tokens_are_not_kept(directory: RunDirectory) -> None:
    """A run directory may be shown to others."""
    token = "hf_" + "a" * 34
    facts_of(f"login('{token}')\n", directory, {}, 0)
    assert token not in (directory.path / "recipe.py").read_text()


def test_recipe_without_a_file_is_no_mistake(directory: RunDirectory, tmp_path: Path) -> None:
    """One that was typed in."""
    assert RecipeSource(tmp_path / "none.py").facts(directory, {}, 0) == {}
