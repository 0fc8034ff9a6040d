"""The report of an ablation: it chooses by validation data, and describes by other figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation
from tests.launch import REPOSITORY

PLAN = {"recipe": "mnist_mlp", "flags": [], "seeds": [0], "variants": {"as it is": []}}


def ablate(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    summary: dict[str, float],
    plan_fields: dict[str, Any] = PLAN,
) -> Path:
    """Run the ablation with a training that reaches these figures; return its file of results."""

    def train(recipe: Path, flags: list[str], seed: int) -> dict[str, Any]:
        return {"seed": seed, "cpu_seconds": 1.0, "summary": summary}

    plan = folder / "plan.json"
    plan.write_text(json.dumps(plan_fields))
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


@pytest.mark.parametrize(
    ("file_name", "figure"),
    [
        ("cifar10-ablation.json", "val/accuracy"),
        ("cifar10-speedrun-ablation.json", "test/accuracy_tta"),
        ("cifar10-together-ablation.json", "test/accuracy_tta"),
    ],
)
def test_table_of_the_page_is_that_of_the_results(file_name: str, figure: str) -> None:
    """The page shows what `ablation.py` prints for its file of results."""
    folder = REPOSITORY / "benchmarks"
    results = json.loads((folder / "results" / file_name).read_text())
    assert all(results["runs"][variant] for variant in results["variants"])
    page = (folder / "README.md").read_text()
    assert ablation.as_markdown(results, figure) in page
    for sentence in ablation.sentences_about(results, figure):
        assert sentence in page


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
    plan = {"variants": accuracies, "runs": runs}
    table = ablation.as_markdown(plan, "val/accuracy")
    assert "| as it is | 91.00 % | – | 1.41 | 2 | 3 |" in table
    assert "| no shifts | 86.00 % | -5.00 | 1.41 | 2 | 3 |" in table
    # The standard error is √2, and Student's t for two degrees of freedom is 4.3027.
    assert ablation.intervals_in_words(plan, "val/accuracy") == [
        "no shifts: the difference is -5.00 points, with a 95 % interval of -11.08 to +1.08 (Welch)"
    ]


def publish(folder: Path, accuracies: Sequence[float]) -> None:
    """Write finished runs with the seeds 0, 1, ..."""
    for seed, accuracy in enumerate(accuracies):
        run = folder / f"seed-{seed}"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"test/accuracy": accuracy}))


def test_further_seeds_of_the_baseline_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A call that continues does not train them again."""
    publish(tmp_path / "published", (0.90, 0.91))
    plan = {
        **PLAN,
        "figure": "test/accuracy",
        "baseline": str(tmp_path / "published"),
        "seeds": [1, 2],
    }
    first = ablate(monkeypatch, tmp_path, {"test/accuracy": 0.85}, plan)
    continued = {**json.loads(first.read_text()), "seeds": [1, 2, 3]}
    output = ablate(monkeypatch, tmp_path, {"test/accuracy": 0.80}, continued)
    runs = json.loads(output.read_text())["runs"]["as it is"]
    accuracies = {run["seed"]: run["summary"]["test/accuracy"] for run in runs}
    assert accuracies == {0: 0.90, 1: 0.91, 2: 0.85, 3: 0.80}


def test_published_runs_are_the_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the other variants are trained, and a sentence says what chance explains."""
    publish(tmp_path / "published", (0.90, 0.91, 0.92))
    plan = {
        **PLAN,
        "figure": "test/accuracy",
        "baseline": str(tmp_path / "published"),
        "variants": {"as it is": [], "no shifts": [], "no flips": []},
    }
    output = ablate(monkeypatch, tmp_path, {"test/accuracy": 0.85}, plan)
    runs = json.loads(output.read_text())["runs"]
    assert {variant: len(runs[variant]) for variant in runs} == {
        "as it is": 3,
        "no shifts": 1,
        "no flips": 1,
    }
    text = capsys.readouterr().out
    assert "| as it is | 91.00 % | – | 1.00 | 3 | – |" in text
    assert "| no shifts | 85.00 % | -6.00 | – | 1 | 1 |" in text
    # Student's t for 2 degrees of freedom and two variants: stats.t.ppf(1 - 0.05 / 4, 2) = 6.2053.
    margin = 6.2053 * (1 + 1 / 3) ** 0.5
    assert f"within ± {margin:.2f} points" in text


def test_baseline_without_runs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sentence names the folder."""
    plan = {**PLAN, "figure": "test/accuracy", "baseline": str(tmp_path / "nothing")}
    with pytest.raises(SystemExit, match=r"nothing has no folder seed-N"):
        ablate(monkeypatch, tmp_path, {"test/accuracy": 0.85}, plan)
