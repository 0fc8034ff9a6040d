"""The notebook runs from its first cell to its last, as Colab and Kaggle run it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launch import REPOSITORY, clean_environment

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"


def printed(cell: nbformat.NotebookNode) -> str:
    """Return what a code cell printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "examples"], ids=["repository", "examples"])
def test_notebook_runs(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started in the repository or in its `examples/`, so nothing is cloned."""
    for name in ("recipes", "common"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "examples").mkdir()
    environment = clean_environment(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{environment['PATH']}")

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path / folder)}}
    )
    client.execute()

    by_command = {cell.source: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    for name in ("first", "second"):
        status = json.loads((tmp_path / "runs" / name / "status.json").read_text())
        assert status["status"] == "finished"
    (comparison,) = [text for source, text in by_command.items() if "compare" in source]
    assert "(baseline)" in comparison
    assert (tmp_path / "compared.png").stat().st_size > 1000
    (prediction,) = [text for source, text in by_command.items() if "predict runs" in source]
    assert json.loads(prediction)["label"] == "0"
    assert "Linear(in_features=64" in printed(notebook.cells[-2])


def test_notebook_has_no_outputs() -> None:
    """Outputs in the repository would be somebody's old run."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code_cells) > 5
    assert not any(cell.outputs or cell.execution_count for cell in code_cells)
