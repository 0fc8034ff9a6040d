"""`recipes predict` reaches the accuracy of the run's own evaluation."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from common.data.reading.built_in import digits, docstrings
from common.tools.predict.command import main
from tests.conftest import first
from tests.launch import Finished

pytestmark = pytest.mark.usefixtures("own_accelerator")
Captured = pytest.CaptureFixture[str]


def accuracy(run: Finished, inputs: Path, truth: Sequence[int], capsys: Captured) -> float:
    """Return the share of right labels among those that the command prints."""
    main([str(run.directory), str(inputs), "--batch-size", str(run.config["config"]["batch_size"])])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = run.read("model/model.json")["class_names"]
    right = [row["label"] == names[label] for row, label in zip(rows, truth, strict=True)]
    return sum(right) / len(right)


@pytest.mark.parametrize("name", first(1, ["learned_mlp", "learned_resnet"]))
def test_images(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Predictions for image files of the test split have the accuracy of the run's evaluation."""
    run = request.getfixturevalue(name)
    held_out = digits()["test"]
    paths: list[str] = []
    for number, row in enumerate(held_out):
        paths.append(str(tmp_path / f"{number}.png"))
        row["image"].save(paths[-1])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(paths)))
    predicted_accuracy = accuracy(run, Path("-"), held_out["label"], capsys)
    assert predicted_accuracy == pytest.approx(run.summary["test/accuracy"], abs=1e-9)


@pytest.mark.slow
def test_text(learned_bert: Finished, tmp_path: Path, capsys: Captured) -> None:
    """Predictions for a file with one text a line have the accuracy of the run's evaluation.

    The batches differ from those of the evaluation, so bf16 may round a few predictions otherwise.
    """
    held_out = docstrings()["test"]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(" ".join(text.split()) for text in held_out["text"]))
    predicted_accuracy = accuracy(learned_bert, file, held_out["label"], capsys)
    assert predicted_accuracy == pytest.approx(learned_bert.summary["test/accuracy"], abs=2e-3)


@pytest.mark.parametrize("name", first(1, ["learned_mlp", "learned_resnet", "learned_bert"]))
def test_model_folder_can_be_published(name: str, request: pytest.FixtureRequest) -> None:
    """The model card has the run's figures, and no file names a folder of this machine."""
    run = request.getfixturevalue(name)
    card = ModelCard.load(run.directory / "model" / "README.md")
    for result in card.data.eval_results:
        assert result.metric_value == run.summary[f"test/{result.metric_type}"]
    assert "accuracy" in {result.metric_type for result in card.data.eval_results}
    for path in (run.directory / "model").iterdir():
        if path.suffix in (".json", ".md"):
            assert str(Path.home()) not in path.read_text(), path
            assert str(run.directory.parent) not in path.read_text(), path
