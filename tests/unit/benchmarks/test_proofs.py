"""The table of the proofs of all recipes and examples."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import proofs
from benchmarks.proofs import markdown, provable_files, receipt_path
from common.tools.prove.receipt import CheckResult, ProofReceipt, read_receipt, write_receipt
from tests.launch import REPOSITORY, Runner
from tests.unit.tools.prove.test_proof import receipt


def test_each_recipe_and_example_is_proven() -> None:
    files = provable_files()
    assert files[0].startswith("recipes/")
    for folder in ("recipes", "examples"):
        names = {path.name for path in (REPOSITORY / folder).glob("*.py")} - {"__init__.py"}
        assert {Path(file).name for file in files if file.startswith(f"{folder}/")} == names
    paths = {receipt_path(Path("receipts"), file) for file in files}
    assert len(paths) == len(files), "each file has a receipt of its own"


def with_checks(recipe: str, answers: dict[str, bool | None]) -> ProofReceipt:
    """Return a receipt of a recipe with one result for each check."""
    made_up = receipt(*answers.values())
    results: list[CheckResult] = [
        result.model_copy(update={"name": name})
        for name, result in zip(answers, made_up.checks, strict=True)
    ]
    return made_up.model_copy(update={"recipe": recipe, "checks": results})


def test_table_has_a_column_for_each_check_that_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = with_checks("recipes/first.py", {"learns": True, "resumes": False})
    second = with_checks("recipes/second.py", {"learns": True, "memory": None})
    expected = [
        "| | `learns` | `resumes` | `memory` | seconds |",
        "|---|:-:|:-:|:-:|--:|",
        "| `recipes/first.py` | ✓ | **✗** |  | 3 |",
        "| `recipes/second.py` | ✓ |  | – | 3 |",
    ]
    assert markdown([first, second]).splitlines() == expected
    for shown in (first, second):
        write_receipt(receipt_path(tmp_path, shown.recipe), shown)
    files = [first.recipe, second.recipe, "recipes/not_proven_yet.py"]
    words = ["proofs.py", "--show", "--receipts", str(tmp_path), *files]
    monkeypatch.setattr(sys, "argv", words)
    proofs.main()
    assert capsys.readouterr().out.splitlines() == expected


def test_only_lora_gets_a_model_that_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, check: bool = False) -> SimpleNamespace:
        commands.append(command[1:])
        if command[1] == "recipes/bert.py":
            model = tmp_path / proofs.CHECKPOINT_RUN / "model"
            model.mkdir(parents=True)
            tensors = {"bert.weight": torch.ones(2), "classifier.weight": torch.ones(3)}
            save_file(tensors, model / "model.safetensors")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(proofs, "REPOSITORY", tmp_path)
    monkeypatch.setattr(proofs.subprocess, "run", run)
    files = ["examples/lora.py", "examples/gan.py", "examples/lora.py"]
    assert proofs.prove_all(files, tmp_path / "receipts", None) == []
    trainings = [command for command in commands if command[0] == "recipes/bert.py"]
    assert len(trainings) == 1
    expected = ["--model", proofs.CHECKPOINT]
    proven = [command for command in commands if command[0] == "-m"]
    assert [command[-2:] == expected for command in proven] == [True, False, True]
    weights = load_file(tmp_path / proofs.CHECKPOINT / "model.safetensors")
    assert weights.keys() == {"bert.weight"}


@pytest.mark.slow
def test_proofs_leave_receipts_and_fail_with_the_first_that_fails(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file can't be proven, because it does not exist."""
    monkeypatch.setattr(sys, "executable", str(runner.python))
    files = ["examples/freezing.py", "examples/missing.py"]
    words = ["proofs.py", *files, "--checks", "learns", "--receipts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"not proven: examples/missing\.py;"):
        proofs.main()
    assert read_receipt(tmp_path / "freezing.json").passed
    assert not (tmp_path / "missing.json").exists()


def test_receipts_are_replaced_after_the_last_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receipt names the uncommitted changes, so no new receipt may be one of them."""
    folder = tmp_path / "receipts"
    folder.mkdir()
    files = ["examples/gan.py", "examples/freezing.py", "examples/missing.py"]
    for file in files:
        receipt_path(folder, file).write_text("old")

    def run(command: list[str], cwd: Path) -> SimpleNamespace:
        assert {path.read_text() for path in folder.iterdir()} == {"old"}
        if "examples/missing.py" in command:
            return SimpleNamespace(returncode=2)
        Path(command[command.index("--output") + 1]).write_text("new")
        return SimpleNamespace(returncode=1 if "examples/gan.py" in command else 0)

    monkeypatch.setattr(proofs, "REPOSITORY", tmp_path)
    monkeypatch.setattr(proofs.subprocess, "run", run)
    failed_files = proofs.prove_all(files, folder, None)
    assert failed_files == ["examples/gan.py", "examples/missing.py"]
    receipts = {path.name: path.read_text() for path in folder.iterdir()}
    assert receipts == {"gan.json": "new", "freezing.json": "new"}
