"""The report of an ablation judges by validation data, or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation
from tests.launch import REPOSITORY

PLAN = {"recipe": "mnist_mlp", "flags": [], "seeds": [0], "variants": {"as it is": []}}


def ablate(monkeypatch: pytest.MonkeyPatch, folder: Path, summary: dict[str, float]) -> Path:
    """Run the ablation with a training that reaches these figures; return its file of results."""

    def train(recipe: Path, flags: list[str], seed: int) -> dict[str, Any]:
        return {"seed": seed, "cpu_seconds": 1.0, "summary": summary}

    plan = folder / "plan.json"
    plan.write_text(json.dumps(PLAN))
    output = folder / "results.json"
    monkeypatch.setattr(ablation, "train", train)
    monkeypatch.setattr(sys, "argv", ["ablation.py", str(plan), "--output", str(output)])
    ablation.main()
    return output


def test_test_figures_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sentence says what to add to the plan, and no such result is written."""
    with pytest.raises(SystemExit, match=r"add --validation-share 0\.1 to the plan"):
        ablate(monkeypatch, tmp_path, {"test/accuracy": 0.99})
    assert not (tmp_path / "results.json").exists()


def test_validation_figures_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test figure is not looked at."""
    output = ablate(monkeypatch, tmp_path, {"test/accuracy": 0.99, "val/accuracy": 0.9})
    assert json.loads(output.read_text())["runs"]["as it is"][0]["seed"] == 0
    assert "90.00" in capsys.readouterr().out


def test_table_of_the_page_is_that_of_the_results() -> None:
    """The page shows what `ablation.py` prints for its file of results."""
    folder = REPOSITORY / "benchmarks"
    results = json.loads((folder / "results" / "cifar10-ablation.json").read_text())
    assert all(results["runs"][variant] for variant in results["variants"])
    page = (folder / "README.md").read_text()
    assert ablation.as_markdown(results, "accuracy") in page


def test_differences_are_from_the_first_variant() -> None:
    """Means are taken over the seeds of each variant."""
    accuracies = {"as it is": (0.90, 0.92), "no shifts": (0.85, 0.87)}
    runs = {
        variant: [
            {"seed": seed, "cpu_seconds": 3.0, "summary": {"val/accuracy": accuracy}}
            for seed, accuracy in enumerate(values)
        ]
        for variant, values in accuracies.items()
    }
    table = ablation.as_markdown({"variants": accuracies, "runs": runs}, "accuracy")
    assert "| as it is | 91.00 % | – | 1.41 | 2 | 3 |" in table
    assert "| no shifts | 86.00 % | -5.00 | 1.41 | 2 | 3 |" in table
