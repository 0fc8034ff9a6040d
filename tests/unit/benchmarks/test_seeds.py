"""The figures of several seeds: what is stated of a run, and the interval of a mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.harness.whole_command import TimedCommand
from benchmarks.seeds import figures_of, mean_interval, summary_lines
from common.tools.statistics.samples import Sample
from tests.launch import REPOSITORY


@pytest.mark.parametrize("count", [2, 3, 10, 40])
def test_interval_is_that_of_scipy(count: int) -> None:
    """Both compute Student's t."""
    values = np.random.default_rng(count).normal(0.94, 0.001, count)
    expected = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert mean_interval(Sample.of(values.tolist())) == pytest.approx(expected, rel=1e-9)


def test_one_seed_has_no_interval() -> None:
    """Nothing shows how much its figures vary by chance."""
    assert mean_interval(Sample.of([0.9])) is None
    run = figures_of(0, TimedCommand(12.34, {"test/accuracy": 0.9}, 0.0))
    assert run == {"seed": 0, "seconds": 12.3, "figures": {"test/accuracy": 0.9}}
    assert all(line.split()[-2:] == ["–", "1"] for line in summary_lines([run])[1:])


def test_only_figures_of_evaluations_are_stated() -> None:
    """Counts and figures of training stand in the published runs."""
    figures = {
        "train/loss": 1.0,
        "test/accuracy": 0.9,
        "test/count": 10.0,
        "val/f1": 0.8,
        "perf/other_cpu_fraction": 0.01,
    }
    stated = figures_of(3, TimedCommand(1.0, figures, 0.0))["figures"]
    assert set(stated) == {"test/accuracy", "val/f1", "perf/other_cpu_fraction"}


@pytest.mark.exhaustive
def test_seeds_of_a_recipe_are_trained_and_published(tmp_path: Path) -> None:
    """The file of figures agrees with the summaries of the published runs."""
    runs = tmp_path / "runs"
    words = ["benchmarks/seeds.py", "recipes/mnist_mlp.py", "--dataset", "digits"]
    words += ["--seeds", "1", "2", "--runs", str(runs), "--", "--epochs", "1"]
    finished = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads((runs / "seeds.json").read_text())
    assert results["flags"] == ["--epochs", "1"]
    accuracies = []
    for run in results["runs"]:
        summary = json.loads((runs / f"seed-{run['seed']}" / "summary.json").read_text())
        assert run["figures"]["test/accuracy"] == summary["test/accuracy"]
        assert run["seconds"] > summary["time/total_seconds"]
        accuracies.append(summary["test/accuracy"])
    assert f"{np.mean(accuracies):.5g}" in finished.stdout
