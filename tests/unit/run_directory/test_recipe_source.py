"""The recipe's text: kept at the first start. Later changes are printed and listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import PartialState

from common.run_directory.directory import RunDirectory
from common.run_directory.recipe_source import MAX_LINES, RecipeSource
from common.run_directory.records import Source
from tests.unit.recipes import take_directory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Return the directory of a new run."""
    PartialState(cpu=True)
    return take_directory(tmp_path / "run")


def source_of(text: str, directory: RunDirectory, saved: Source, step: int) -> Source:
    """Start or resume a run of a recipe with this text."""
    recipe = directory.path.parent / "recipe.py"
    recipe.write_text(text)
    return RecipeSource(recipe).record(directory, saved, step)


def test_changes_are_printed_and_listed(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first resume prints the difference, and later ones only its update."""
    first = source_of("import torch\nF.relu(x)\n", directory, Source(), 0)
    assert (directory.path / "recipe.py").read_text() == "import torch\nF.relu(x)\n"
    assert first.changes == []
    assert source_of("import torch\nF.relu(x)\n", directory, first, 3) == first
    assert capsys.readouterr().out == ""
    second = source_of("import torch\nF.tanh(x)\n", directory, first, 3)
    output = capsys.readouterr().out
    assert "-F.relu(x)" in output
    assert "+F.tanh(x)" in output
    assert "import" not in output
    assert [change.global_step for change in second.changes] == [3]
    assert source_of("import torch\nF.tanh(x)\n", directory, second, 5) == second
    output = capsys.readouterr().out
    assert "changed at update 3" in output
    assert "+F.tanh" not in output
    back = source_of("import torch\nF.relu(x)\n", directory, second, 7)
    assert [change.global_step for change in back.changes] == [3, 7]
    # A resume from before a change uses the text that the run had until then.
    assert source_of("import torch\nF.relu(x)\n", directory, back, 3) == first


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ("x = 1  # a comment\n", True),
        ('"""A docstring."""\nx = 1\n', True),
        ("x = 2\n", False),
    ],
)
def test_digest_is_of_the_code_alone(text: str, is_same: bool, tmp_path: Path) -> None:
    """A comment makes no other recipe."""
    recipe = tmp_path / "recipe.py"
    digests = []
    for each_text in ("x = 1\n", text):
        recipe.write_text(each_text)
        digests.append(RecipeSource(recipe).digest_of_code())
    assert None not in digests
    assert (digests[0] == digests[1]) == is_same


def test_code_that_cannot_be_parsed_has_no_digest(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("x = (\n")
    assert RecipeSource(recipe).digest_of_code() is None


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
    """Comments, docstrings and line ends are not changes; the code beside them is."""
    first = source_of(CODE, directory, Source(), 0)
    assert source_of(text, directory, first, 3) == first
    assert capsys.readouterr().out == ""
    changed = source_of(text.replace("x - 1", "x + 1"), directory, first, 3)
    assert [change.global_step for change in changed.changes] == [3]
    assert "x + 1" in capsys.readouterr().out


def test_text_that_is_no_python_is_compared_literally(directory: RunDirectory) -> None:
    """Even a comment counts as a change there."""
    first = source_of("a b", directory, Source(), 0)
    assert len(source_of("a b # c", directory, first, 3).changes) == 1


def test_long_differences_are_cut(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line names the file to compare with."""
    first = source_of("", directory, Source(), 0)
    source_of("".join(f"line {number}\n" for number in range(999)), directory, first, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MAX_LINES + 2
    assert str(directory.path / "recipe.py") in lines[-1]


def test_tokens_are_not_kept(directory: RunDirectory) -> None:
    """A user may show a run directory to others."""
    token = "hf_" + "a" * 34
    source_of(f"login('{token}')\n", directory, Source(), 0)
    assert token not in (directory.path / "recipe.py").read_text()


def test_recipe_without_a_file_is_allowed(directory: RunDirectory, tmp_path: Path) -> None:
    """A recipe may have been typed into an interpreter."""
    assert RecipeSource(tmp_path / "none.py").record(directory, Source(), 0) == Source()
