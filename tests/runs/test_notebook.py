"""The notebook runs from its first cell to its last, as Colab and Kaggle run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.launch import REPOSITORY, Runner, clean_environment

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"
ADDRESS = "https://github.com/OWNER/accelerate-recipes.git"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    """The notebook of the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(autouse=True)
def environment(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a user's environment, in which `python` is a fork of the tests' template."""
    variables = clean_environment(runner.folder)
    folders = (runner.python.parent, Path(sys.executable).parent)
    variables["PATH"] = f"{folders[0]}:{folders[1]}:{variables['PATH']}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Run the cells in a folder; return what each code cell printed."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, resources=resources).execute()
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in code_cells]


def make_origin(folder: Path) -> None:
    """Make a git repository of the files that a clone needs."""
    folder.mkdir()
    for name in ("recipes", "common"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for words in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "All"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.slow
def test_notebook_runs(notebook: nbformat.NotebookNode, tmp_path: Path) -> None:
    """In an empty folder, the notebook clones the repository, trains, compares and predicts."""
    make_origin(tmp_path / "origin")
    install_cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert ADDRESS in install_cell.source
    install_cell.source = install_cell.source.replace(ADDRESS, f"file://{tmp_path}/origin")
    working_folder = tmp_path / "content"
    working_folder.mkdir()
    printed = execute(notebook, working_folder)

    clone = working_folder / "accelerate-recipes"
    for name in ("first", "second"):
        status = json.loads((clone / "runs" / name / "status.json").read_text())
        assert status["status"] == "finished"
    comparison, _, prediction, network = printed[-4:]
    assert "(baseline)" in comparison
    assert (clone / "compared.png").stat().st_size > 1000
    assert json.loads(prediction)["label"] == "0"
    assert "Linear(in_features=64" in network


def test_address_must_be_set(notebook: nbformat.NotebookNode, tmp_path: Path) -> None:
    """Outside the repository, the first cell asks for the address, and clones nothing."""
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = code_cells[:1]
    with pytest.raises(CellExecutionError, match="Set REPOSITORY to the address of your copy"):
        execute(notebook, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("folder", ["", "examples"])
def test_notebook_clones_nothing_in_the_repository(
    notebook: nbformat.NotebookNode, folder: str, tmp_path: Path
) -> None:
    """The first cell finds the repository from its root and from `examples/`, and clones none."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "examples").mkdir()
    first_code_cell = next(
        index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"
    )
    notebook.cells = notebook.cells[: first_code_cell + 1]
    notebook.cells.append(nbformat.v4.new_code_cell("print(Path.cwd())"))
    assert execute(notebook, tmp_path / folder) == ["", f"{tmp_path}\n"]
    assert not [*tmp_path.rglob("accelerate-recipes")]


def test_notebook_has_no_outputs(notebook: nbformat.NotebookNode) -> None:
    """The notebook in the repository has no outputs: outputs would show an old run."""
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code_cells) > 5
    assert not any(cell.outputs or cell.execution_count for cell in code_cells)
