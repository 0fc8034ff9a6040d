"""Comparisons of made-up runs: unfair differences, unfinished runs, W&B's API, and pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from common.config import TrainingConfig
from common.errors import UserError
from common.flags import flag
from common.lifecycle.start.run_config import overridden_decisions
from common.run_directory.records import RunConfig
from common.tools.compare import output_formats
from common.tools.compare.command import main
from common.tools.compare.comparison import compare
from common.tools.compare.figures import FIGURES
from common.tools.compare.group_table import group_cells
from common.tools.compare.missing_values import missing_value_warnings
from common.tools.compare.output_formats import as_json
from common.tools.compare.readers import wandb_runs
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.readers.wandb_runs import record_of
from common.tools.compare.report import as_markdown, show
from common.tools.compare.run_table import run_cells
from common.tools.compare.warnings_and_notes import notes, unfair_warnings
from common.track.flat_config import flat_columns, nested_facts
from common.track.names import metric_named
from tests.unit.tools.compare.run_folders import FACTS, rows, write_run


def table(*sources: str, target: float | None = None) -> dict[str, list[str]]:
    """Return the table of a comparison as one list of cells a label."""
    cells = run_cells(compare(read_runs(sources), target))
    return {label: values for label, *values in cells}


def test_table_shows_figures_and_ratios(tmp_path: Path) -> None:
    """Throughput and memory have ratios to the first run, and accuracies name their split."""
    slow = write_run(tmp_path / "slow")
    quick = write_run(
        tmp_path / "quick",
        {"environment.mixed_precision": "bf16"},
        rows([0.6, 0.8], speed=2500.0),
        {"memory/peak_allocated_mib": 1204.0, "perf/joules_per_sample": 0.25},
    )
    shown = table(slow, quick)
    assert shown[""] == ["slow (baseline)", "quick"]
    assert shown["status"] == ["finished", "finished"]
    assert shown["throughput, samples/s"] == ["1,000", "2,500 (2.50×)"]
    assert shown["peak memory, MiB, device"] == ["804", "1,204 (1.50×)"]
    assert shown["final accuracy, test"] == ["0.8800", "0.8800"]
    assert shown["best accuracy, validation"] == ["0.9000", "0.8000"]
    assert shown["training time"] == ["8.0 s", "8.0 s"]
    assert shown["energy, J/sample"] == ["–", "0.25"]
    assert shown["precision"] == ["fp16", "bf16"]
    assert "--batch-size" not in shown  # the same in both


def test_default_target_is_reached_by_all_runs(tmp_path: Path) -> None:
    """The default target is the lowest of the runs' best accuracies."""
    first = write_run(tmp_path / "first", logged=rows([0.5, 0.7, 0.85, 0.9]))
    second = write_run(tmp_path / "second", logged=rows([0.6, 0.86, 0.8], seconds=3.0))
    assert table(first, second)["time to accuracy 0.8600"] == ["8.0 s (step 40)", "6.0 s (step 20)"]
    with_target = table(first, second, target=0.88)
    assert with_target["time to accuracy 0.8800"] == ["8.0 s (step 40)", "not reached"]


LESS = {"objective": "rmse:min"}


@pytest.mark.parametrize("target", ["nan", "inf", "-1e999"])
def test_target_that_no_value_can_reach_is_refused(target: str, tmp_path: Path) -> None:
    """Each run would be said to have missed it."""
    with pytest.raises(UserError, match=r"--target \S+ is out of range: pass a finite number"):
        main([write_run(tmp_path / "run"), f"--target={target}"])


def test_minimised_objective_is_compared(tmp_path: Path) -> None:
    """Best value, target and time to target follow the direction, below zero too."""
    first_rows = rows([3.0, 0.5, 0.0], metric="rmse")
    second_rows = rows([2.0, 1.0, -1.0], metric="rmse")
    first = write_run(tmp_path / "0", LESS, first_rows, {"test/rmse": 0.0})
    second = write_run(tmp_path / "1", LESS, second_rows, {"test/rmse": -0.5})
    shown = table(first, second)
    assert shown["final RMSE, test"] == ["0.0000", "-0.5000"]
    assert shown["best RMSE, validation"] == ["0.0000", "-1.0000"]
    assert shown["time to RMSE 0.0000"] == ["6.0 s (step 30)", "6.0 s (step 30)"]
    with_target = table(first, second, target=0.6)
    assert with_target["time to RMSE 0.6000"] == ["4.0 s (step 20)", "6.0 s (step 30)"]
    figures = compare(read_runs([first, second])).figures
    assert [run.final["rmse"] for run in figures] == [0.0, -0.5]
    assert [run.best for run in figures] == [0.0, -1.0]
    assert [run.objective for run in figures] == ["rmse:min"] * 2


def test_different_objectives_are_unfair_but_shown(tmp_path: Path) -> None:
    """Each run has its own figures, and the target is that of the first run."""
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", LESS, rows([3.0, 0.5], metric="rmse"))
    comparison = compare(read_runs([first, second]))
    assert unfair_warnings(comparison) == ["first and second: objective accuracy:max and rmse:min"]
    shown = table(first, second, target=0.8)
    assert shown["objective"] == ["accuracy:max", "rmse:min"]
    assert shown["best accuracy, validation"] == ["0.9000", "–"]
    assert shown["best RMSE, validation"] == ["–", "0.5000"]
    assert not any("objective" in label for label in shown if label != "objective")
    assert shown["time to accuracy 0.8000"] == ["6.0 s (step 30)", "–"]
    main([first, second, "--plot", str(tmp_path / "both.png")])
    with Image.open(tmp_path / "both.png") as image:
        assert image.height > 1100  # one more row of curves


def write_evaluated_run(folder: Path, objective: str, metrics: dict[str, float]) -> str:
    """Write a run whose only evaluation, on validation and on test data, has these metrics."""
    own_metric, _, _ = objective.partition(":")
    (row,) = rows([0.5], metric=own_metric)
    summary = {f"val/best_{own_metric}": metrics[own_metric]}
    for name, value in metrics.items():
        row[f"val/{name}"] = value
        summary[f"test/{name}"] = value
    return write_run(folder, {"objective": objective}, [row], summary)


@pytest.mark.parametrize("is_logged_by_all", [True, False])
@pytest.mark.parametrize("other", ["macro_f1:max", "loss:min", "rmse:min", "own_score:max"])
def test_each_metric_of_the_objectives_has_rows_of_its_own(
    other: str, is_logged_by_all: bool, tmp_path: Path
) -> None:
    """A row never mixes metrics, and a run has each metric that it logs, whatever its objective."""
    other_metric, _, _ = other.partition(":")
    all_metrics = {"accuracy": 0.75, "loss": 0.5, other_metric: 0.25}
    own_metrics = {"accuracy": 0.75, "loss": 0.5}
    if is_logged_by_all:
        own_metrics = all_metrics
    first = write_evaluated_run(tmp_path / "first", "accuracy:max", own_metrics)
    second = write_evaluated_run(tmp_path / "second", other, all_metrics)
    comparison = compare(read_runs([first, second]))
    tables = [run_cells(comparison), group_cells(comparison)]
    for cells in tables:
        shown = {label: values for label, *values in cells}
        for metric in ("accuracy", other_metric):
            label = metric_named(metric).label
            expected = [
                metric_named(metric).text(metrics.get(metric))
                for metrics in (own_metrics, all_metrics)
            ]
            assert shown[f"final {label}, test"] == expected
            assert shown[f"best {label}, validation"] == expected
        assert not any("objective" in label for label in shown if label != "objective")
    assert table(first, second)["  standard error, 200 samples"] == ["0.0306", "0.0306"]
    assert missing_value_warnings(comparison) == []


def test_run_without_validation_shows_test_figures(tmp_path: Path) -> None:
    """Without a validation split, training evaluates on test data, and the labels say so."""
    sizes = {"data.sizes": {"train": 1000, "test": 200}}
    shown = table(write_run(tmp_path / "run", sizes, rows([0.5, 0.7], split="test")))
    assert shown["best accuracy, test"] == ["0.7000"]
    assert shown["final accuracy, test"] == ["0.8800"]


def test_metrics_of_a_recipe_are_shown(tmp_path: Path) -> None:
    """Each metric of the final evaluation has a row, except counts and W&B's additions."""
    more = {"test/f1": 0.5, "test/own_score": 2, "test/accuracy.max": 1, "val/f1": 0.4}
    shown = table(write_run(tmp_path / "run", summary=more))
    finals = {label: cells for label, cells in shown.items() if label.startswith("final")}
    assert finals == {
        "final accuracy, test": ["0.8800"],
        "final loss, test": ["0.5000"],
        "final F1, test": ["0.5000"],
        "final own score, test": ["2.0000"],
    }


def test_logs_without_times_give_steps(tmp_path: Path) -> None:
    """The time to the target is unknown, but its step is shown."""
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", logged=rows([0.6, 0.9], seconds=None))
    comparison = compare(read_runs([first, second]))
    cells = {label: values for label, *values in run_cells(comparison)}
    assert cells["time to accuracy 0.9000"] == ["8.0 s (step 40)", "– (step 20)"]


UNFAIR = {
    "recipe": "bert",
    "objective": "accuracy:min",
    "data.name": "mnist",
    "data.sizes": {"train": 900, "validation": 100, "test": 200},
    "architecture.name": "resnet50",
    "architecture.parameters": 5,
    "environment.device": "Another GPU",
    "environment.effective_batch_size": 256,
    "environment.versions": {"torch": "2.15.0", "accelerate": "1.15.0"},
    "environment.python": "3.12.1",
}


@pytest.mark.parametrize(("path", "value"), UNFAIR.items(), ids=list(UNFAIR))
def test_unfair_difference_is_named(path: str, value: Any, tmp_path: Path) -> None:
    """The warning names both runs and both values of the fact that differs."""
    sources = [
        write_run(tmp_path / "mine"),
        write_run(tmp_path / "theirs", {path: value}),
        write_run(tmp_path / "same"),
    ]
    (warning,) = unfair_warnings(compare(read_runs(sources)))
    assert warning.startswith("mine and theirs: ")
    before: Any = FACTS
    for name in path.split("."):
        before = before[name]
    if isinstance(value, dict):  # its first entry differs
        part, before = next(iter(before.items()))
        value = next(iter(value.values()))
        assert f" of {part} " in warning
    for side in (before, value):
        shown = side if isinstance(side, str) else f"{side:,}"
        assert shown in warning


def test_runs_that_are_unfair_for_the_same_reason_share_a_warning(tmp_path: Path) -> None:
    changes = {"mine": "resnet", "a": "bert", "b": "bert", "c": "mnist_mlp"}
    sources = [write_run(tmp_path / name, {"recipe": recipe}) for name, recipe in changes.items()]
    assert unfair_warnings(compare(read_runs(sources))) == [
        "mine and each of a, b: recipe resnet and bert",
        "mine and c: recipe resnet and mnist_mlp",
    ]


def test_runs_on_more_processes_show_their_efficiency(tmp_path: Path) -> None:
    """With the same effective batch, they compare fairly. A repetition has no ratio."""
    first = write_run(tmp_path / "two", {"environment.world_size": 2})
    runs = []
    for processes, speed in ((8, 3000.0), (2, 1100.0), (1, 600.0)):
        facts = {"environment.world_size": processes}
        runs.append(write_run(tmp_path / str(processes), facts, rows([0.9], speed)))
    comparison = compare(read_runs([first, *runs]))
    assert not comparison.unfair_differences
    shown = {label: values for label, *values in run_cells(comparison)}
    assert shown["processes"] == ["2", "8", "2", "1"]
    assert shown["throughput, samples/s"][1:] == ["3,000 (3.00×)", "1,100", "600 (0.60×)"]
    assert shown["efficiency over processes"] == ["–", "75%", "–", "120%"]
    assert "efficiency over processes" not in table(first, runs[1])


def test_threads_matter_on_a_cpu_only(tmp_path: Path) -> None:
    """Another number of threads is unfair on a CPU and fair on a GPU."""
    for device, expected in (("cpu", 1), ("cuda", 0)):
        sources = []
        for threads in (1, 2):
            folder = tmp_path / device / str(threads)
            facts = {
                "environment.device_type": device,
                "environment.threads_per_process": threads,
            }
            sources.append(write_run(folder, facts))
        assert len(unfair_warnings(compare(read_runs(sources)))) == expected


def test_processors_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Another kind of CPU is unfair, and no repetition with another seed. A GPU's host is not."""
    for device, groups in (("cpu", 2), ("cuda", 1)):
        sources = []
        for model, instructions in ((1, "AVX2"), (17, "AVX512-BF16")):
            facts = {
                "environment.device": "AMD EPYC, 2 cores",
                "environment.device_type": device,
                "environment.processor": f"AMD EPYC, family 25, model {model}, {instructions}",
            }
            sources.append(write_run(tmp_path / device / str(model), facts))
        comparison = compare(read_runs(sources))
        assert len(comparison.groups) == groups
        texts = unfair_warnings(comparison)
        assert len(texts) == groups - 1
        assert all("processor AMD EPYC, family 25, model 1, AVX2 and " in text for text in texts)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("environment.mixed_precision", "no"),
        ("config.learning_rate", 0.2),
        ("config.seed", 1),
        ("environment.git_commit", "fedcba9876543210"),
    ],
)
def test_intended_differences_are_shown_without_a_warning(
    path: str, value: Any, tmp_path: Path
) -> None:
    """Precision, flags and commits may differ on purpose."""
    comparison = compare(
        read_runs([write_run(tmp_path / "first"), write_run(tmp_path / "second", {path: value})])
    )
    assert not comparison.unfair_differences
    assert len(comparison.differences) == 1


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ("preempted", "preempted at step 20 of 40"),
        ("running", "running at step 20 of 40"),
        ("failed", "failed at step 20 of 40"),
    ],
)
def test_unfinished_run_is_shown_with_its_status(status: str, shown: str, tmp_path: Path) -> None:
    """The table has its figures so far, and the notes have the reason."""
    first = write_run(tmp_path / "first")
    reason = "stopped by SIGTERM"
    logged = rows([0.5, 0.7], speed=500.0)
    changes = {"config.learning_rate": 0.2}
    other = write_run(tmp_path / "other", changes, logged, status=status, reason=reason)
    comparison = compare(read_runs([first, other]))
    cells = {label: values for label, *values in run_cells(comparison)}
    assert cells["status"] == ["finished", shown]
    assert cells["throughput, samples/s"][1] == "500 (0.50×)"
    assert cells["best accuracy, validation"][1] == "0.7000"
    assert cells["final accuracy, test"][1] == "–"
    all_notes = " ".join(notes(comparison))
    assert f"{shown} ({reason})" in all_notes
    assert "median" in all_notes


@pytest.mark.parametrize("status_step", [0, 19, 20, 21, 39])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_status_has_the_newest_update_that_any_file_states(
    epochs: int, status_step: int, tmp_path: Path
) -> None:
    """A run that stops between two log lines has an older row, and a killed run an older status."""
    logged = rows([0.5] * epochs)
    source = write_run(tmp_path / "run", logged=logged, status="preempted", global_step=status_step)
    newest = max(10 * epochs, status_step)
    assert table(source)["status"] == [f"preempted at step {newest} of 40"]


def test_run_without_evaluation_sets_no_target(tmp_path: Path) -> None:
    """A run without evaluation has no accuracy that could be the target."""
    bare = rows([0.5, 0.6])
    for row in bare:
        for name in [name for name in row if name.startswith("val/")]:
            del row[name]
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", logged=bare, status="running")
    shown = table(first, second)
    assert shown["best accuracy, validation"] == ["0.9000", "–"]
    assert shown["time to accuracy 0.9000"] == ["8.0 s (step 40)", "–"]


def test_run_that_only_evaluates_takes_no_time_to_a_target(tmp_path: Path) -> None:
    """Another run has trained its model, so it neither sets a target nor reaches one."""
    trained = [write_run(tmp_path / name) for name in ("first", "second")]
    changes = {"config.evaluate_only": True, "config.init_from": trained[0]}
    only_row = {"progress/global_step": 0, "time/train_seconds": 0.0, "val/accuracy": 0.6}
    evaluated = write_run(tmp_path / "evaluated", changes, [only_row])
    comparison = compare(read_runs([*trained, evaluated]))
    assert comparison.target == 0.9
    assert [figures.reached_target for figures in comparison.figures] == [True, True, None]
    assert compare(read_runs([trained[0], evaluated])).target is None
    given = compare(read_runs([trained[0], evaluated]), target=0.5).figures[1]
    assert (given.reached_target, given.seconds_to_target) == (None, None)


def test_run_without_metrics_is_shown(tmp_path: Path) -> None:
    """A run that was killed before it logged anything has empty cells."""
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", logged=[], status="running")
    (tmp_path / "second" / "metrics.jsonl").unlink()
    shown = table(first, second)
    assert shown["status"][1] == "running at step 0 of 40"
    assert shown["throughput, samples/s"][1] == "–"


def test_damaged_or_missing_runs_are_named(tmp_path: Path) -> None:
    """One sentence names each of them."""
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "many" / "one")
    write_run(tmp_path / "torn")
    (tmp_path / "torn" / "config.json").write_text('{"recipe": ')
    early = tmp_path / "early"
    early.mkdir()
    (early / "status.json").write_text(json.dumps({"status": "failed", "reason": "no such data"}))
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-1.wandb").write_text("no log of transactions")
    advice = (
        f"pass a run in it, such as {tmp_path / 'many' / 'one'} (recipes compare also takes "
        f"several: {tmp_path / 'many'}/*/)"
    )
    expected = {
        "empty": "no config.json",
        "many": f"is a folder of 1 run, not a run itself: {advice}",
        "torn": "can't be read",
        "early": "early has not begun to train (failed: no such data)",
        "wandb": "can't be read as a W&B run",
        "nowhere": "no API key",  # it might be a project of W&B
        "many/one/config.json": "is a file",
    }
    for name, sentence in expected.items():
        source = str(tmp_path / name) if name != "nowhere" else "runs/nowhere"
        with pytest.raises(UserError) as refused:
            read_runs([source])
        assert sentence in refused.value.message, name
        assert Path(source).name in refused.value.message
    with pytest.raises(UserError, match="there is no folder nowhere"):
        read_runs(["nowhere"])


def test_command_of_wandb_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one sentence, and not a traceback."""
    monkeypatch.setattr(wandb_runs, "INSPECTION_SECONDS", 0.001)
    (tmp_path / "run-1.wandb").write_text("")
    with pytest.raises(UserError, match=r"can't be read as a W&B run \(wandb has not read it"):
        read_runs([str(tmp_path)])


def test_incomplete_line_and_replayed_steps_are_resolved(tmp_path: Path) -> None:
    """An incomplete last line is left out, and the last of two rows of a step counts."""
    source = write_run(tmp_path / "run", status="running")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        replayed = {"progress/global_step": 30, "val/accuracy": 0.75, "train/loss": None}
        file.write(json.dumps(replayed) + '\n{"progress/glo')
    (run,) = read_runs([source])
    assert [row["progress/global_step"] for row in run.rows] == [10, 20, 30, 40]
    assert run.rows[2]["val/accuracy"] == 0.75
    assert run.rows[2]["train/loss"] == pytest.approx(2 / 3)


def test_runs_have_distinct_names(tmp_path: Path) -> None:
    """A run's own name comes first. Otherwise the end of its path tells it from others."""
    sources = [write_run(tmp_path / parent / "run") for parent in ("a/x", "b/x", "b/y")]
    named = write_run(tmp_path / "c", {"config.run_name": "mine"})
    alike = [write_run(tmp_path / name, {"config.run_name": "run"}) for name in ("d", "e")]
    names = [run.name for run in read_runs([*sources, named])]
    assert names == ["a/x/run", "b/x/run", "b/y/run", "mine"]
    assert [run.name for run in read_runs(sources[1:])] == ["x/run", "y/run"]
    assert [run.name for run in read_runs([*alike, named])] == ["d", "e", "mine"]
    twice = read_runs([sources[0], named, sources[0]])
    assert [run.name for run in twice] == [sources[0], "mine", sources[0]]


def test_name_and_place_of_a_run_are_no_difference(tmp_path: Path) -> None:
    """Flags that only name or place a run are not compared."""
    kept = {"config.output_dir": "there", "config.tags": ["mine"], "config.run_name": "mine"}
    other = {**kept, "config.mixed_precision": "fp16"}  # the value that the other run's auto chose
    runs = read_runs([write_run(tmp_path / "one"), write_run(tmp_path / "other", other)])
    assert not compare(runs).differences


def test_order_of_splits_does_not_matter(tmp_path: Path) -> None:
    """W&B sorts the keys of a configuration."""
    sizes = FACTS["data"]["sizes"]
    other = {"data.sizes": dict(sorted(sizes.items()))}
    assert list(other["data.sizes"]) != list(sizes)
    comparison = compare(
        read_runs([write_run(tmp_path / "own"), write_run(tmp_path / "tracked", other)])
    )
    assert not comparison.unfair_differences
    assert not comparison.differences


class FakeApi:
    """Stands in for `wandb.Api`: a project with a finished, a running and a foreign run."""

    def __init__(self, timeout: int) -> None:
        pass

    def api_run(self, name: str, config: dict[str, Any], state: str) -> SimpleNamespace:
        """Return a run as the API does."""
        history = [row | {"_step": index, "_runtime": 1.0} for index, row in enumerate(rows([0.5]))]
        end = {"time/total_seconds": 10.0, "val/accuracy": 0.5} if state == "finished" else {}
        return SimpleNamespace(
            name=name,
            id=f"id-{name}",
            path=["me", "project", f"id-{name}"],
            config=config,
            state=state,
            summary_metrics={"_wandb": {"runtime": 3}} | end,
            scan_history=lambda: iter(history),
        )

    def runs(self, path: str, order: str) -> list[SimpleNamespace]:
        """Return the runs of a project."""
        if path == "me/missing":
            raise ValueError("Could not find project me/missing")
        if path == "me/others":
            return [self.api_run("stranger", {"lr": 1}, "finished")]
        if path == "me/damaged":
            return [self.api_run("damaged", {"objective": "accuracy:max"}, "finished")]
        if path == "me/edited":
            config = flat_columns(RunConfig(**FACTS | {"objective": "accuracy"}))
            return [self.api_run("edited", config, "finished")]
        return [
            self.api_run("first", flat_columns(RunConfig(**FACTS)), "finished"),
            self.api_run("stranger", {"lr": 1}, "finished"),
            self.api_run("second", flat_columns(RunConfig(**FACTS)), "running"),
        ]

    def run(self, path: str) -> SimpleNamespace:
        """Return one run."""
        return self.api_run("stranger" if path.endswith("stranger") else "alone", {}, "finished")


def test_wandb_project_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign runs of the project are left out."""
    monkeypatch.setattr("wandb.Api", FakeApi)
    monkeypatch.setattr(
        "common.track.trackers.wandb_environment.wandb_mode",
        lambda: ("online", "https://api.wandb.ai"),
    )
    first, second = read_runs(["me/project"])
    assert (first.name, first.source, first.status) == ("first", "me/project/id-first", "finished")
    assert first.summary["val/accuracy"] == 0.5
    assert (second.name, second.status, second.summary) == ("second", "running", {})
    assert second.rows[0]["val/accuracy"] == 0.5
    with pytest.raises(UserError, match="Could not find project"):
        read_runs(["me/missing"])
    with pytest.raises(UserError, match="the W&B run me/project/stranger is not a run of these"):
        read_runs(["me/project/stranger"])
    with pytest.raises(UserError, match="the W&B project me/others contains no runs of these"):
        read_runs(["me/others"])
    with pytest.raises(UserError, match=r"me/project/id-damaged is damaged .*: leave this run out"):
        read_runs(["me/damaged"])
    with pytest.raises(
        UserError,
        match=(
            r"the configuration of me/project/id-edited is damaged or was edited \(objective "
            r"'accuracy' does not name .*: leave this run out: pass the other runs"
        ),
    ):
        read_runs(["me/edited"])


def test_comparison_is_printed_in_three_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison is printed for a terminal, as Markdown and as JSON."""
    sources = [
        write_run(tmp_path / "mine"),
        write_run(tmp_path / "theirs", {"environment.effective_batch_size": 256}),
    ]
    main(sources)
    shown = capsys.readouterr().out
    assert "not a fair comparison: mine and theirs: effective batch 128 and 256" in shown
    assert "mine (baseline)" in shown
    main([*sources, "--markdown"])
    markdown = capsys.readouterr().out
    assert "> **not a fair comparison** mine and theirs: effective batch 128 and 256" in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| throughput, samples/s | 1,000 | 1,000 (1.00×) |" in lines
    main([*sources, "--json", "--target", "0.8"])
    values = json.loads(capsys.readouterr().out)
    assert values["baseline"] == "mine"
    assert values["runs"][1]["throughput_ratio"] == 1.0
    assert values["runs"][1]["seconds_to_target"] == 6.0
    assert values["unfair"] == [
        {"run": "theirs", "what": "effective batch", "baseline_value": 128, "value": 256}
    ]


def test_more_than_five_runs_are_rows(tmp_path: Path) -> None:
    """With fewer runs, each has a column."""
    sources = [write_run(tmp_path / f"run-{index}", {"config.seed": index}) for index in range(7)]
    cells = run_cells(compare(read_runs(sources)))
    assert [row[0] for row in cells] == ["", "run-0 (baseline)", *(f"run-{i}" for i in range(1, 7))]
    assert cells[3][cells[0].index("--seed")] == "2"
    assert as_markdown(compare(read_runs(sources))).count("\n| run-") == 7


@pytest.mark.parametrize("name", ["runs.png", "runs.svg"])
def test_picture_is_drawn_of_any_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs may lack times or curves, be many, and have long names."""
    sources = [write_run(tmp_path / f"a-very-long-name-{'x' * 60}-{index}") for index in range(9)]
    sources.append(write_run(tmp_path / "no-times", logged=rows([0.5], seconds=None)))
    sources.append(write_run(tmp_path / "no-rows", logged=[], status="running"))
    main([*sources, "--plot", str(tmp_path / name)])
    assert name in capsys.readouterr().out
    if name.endswith("png"):
        with Image.open(tmp_path / name) as image:
            assert min(image.size) > 800
            assert len(image.convert("RGB").getcolors(2**24) or []) > 20
    else:
        text = (tmp_path / name).read_text()
        assert text.startswith("<?xml")


LONG = "x" * 300
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0  # root may write everywhere


@pytest.mark.parametrize(
    "name",
    [
        "runs.docx",
        "missing/runs.png",
        "file/runs.png",
        "folder.png",
        f"{LONG}.png",
        pytest.param("sealed/runs.png", marks=pytest.mark.skipif(AS_ROOT, reason="as root")),
    ],
)
def test_picture_that_cannot_be_written_gives_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format may be unknown, or the path impossible. No run is read before the refusal."""
    monkeypatch.setattr(output_formats, "read_runs", lambda _: pytest.fail("a run was read"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "sealed").mkdir(mode=0o500)
    with pytest.raises(UserError, match="--plot"):
        main([write_run(tmp_path / "run"), "--plot", str(tmp_path / name)])


@pytest.mark.parametrize(
    "source", [LONG, f"a/{LONG}", "~nobody-of-this-name/run", "run/status.json/x"]
)
def test_impossible_path_of_a_run_is_named(source: str, tmp_path: Path) -> None:
    """The system may even refuse to look up the path."""
    write_run(tmp_path / "run")
    with pytest.raises(UserError) as refused:
        read_runs([str(tmp_path / source) if source.startswith("run") else source])
    assert source in refused.value.message


def test_json_has_no_nan(tmp_path: Path) -> None:
    """NaN becomes null."""
    source = write_run(tmp_path / "run", logged=[rows([0.5])[0] | {"perf/mfu": float("nan")}])
    written = json.dumps(as_json(compare(read_runs([source]))), allow_nan=False)
    (figures,) = json.loads(written)["runs"]
    assert figures["best"] == 0.5
    assert figures["perf/mfu"] is None


def test_compare_imports_no_large_library(tmp_path: Path) -> None:
    """A table needs neither torch nor matplotlib, nor W&B."""
    code = (
        "import sys\n"
        "from common.tools.compare.command import main\n"
        f"main([{write_run(tmp_path / 'run')!r}])\n"
        "print({'torch', 'matplotlib', 'wandb', 'accelerate', 'numpy'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("state", "summary", "status"),
    [
        ("finished", {"time/total_seconds": 9.0}, "finished"),
        ("finished", {}, "preempted"),  # it left W&B properly, but before its end
        ("running", {"val/accuracy": 0.5}, "running"),
        ("failed", {}, "failed"),
        ("crashed", {}, "failed"),
    ],
)
def test_wandb_states_become_statuses(state: str, summary: dict[str, float], status: str) -> None:
    """W&B's state becomes a status of `status.json`."""
    run = record_of("run", "there", flat_columns(RunConfig(**FACTS)), rows([0.5]), summary, state)
    assert run.status == status
    assert bool(run.summary) == ("time/total_seconds" in summary)


def test_compare_honours_the_roles_of_a_copys_flags(tmp_path: Path) -> None:
    """`config.json` and W&B's flat table carry them. Older runs do not."""

    @dataclass(kw_only=True)
    class Config(TrainingConfig):
        nickname: str = flag("", role="record")
        dropout: float = flag(0.0, least=0, most=1)
        notes: str | None = flag(None)  # type: ignore[assignment]

    assert overridden_decisions(Config(), "compared") == {"nickname": False, "notes": True}
    assert overridden_decisions(Config(), "free_on_resume") == {"nickname": True, "notes": False}
    assert overridden_decisions(TrainingConfig(), "compared") == {}
    shown = []
    for compared in ({"nickname": False, "notes": True}, {}):
        runs = []
        for index, name in enumerate("ab"):
            flags = {"nickname": name, "notes": name, "dropout": index, "compared": compared}
            changes = {f"config.{key}": value for key, value in flags.items()}
            changes["compared"] = changes.pop("config.compared")
            runs += read_runs([write_run(tmp_path / f"{name}{len(shown)}", changes)])
        through_wandb = []
        for run in runs:
            saved_config = RunConfig(**nested_facts(flat_columns(run.saved_config)))
            through_wandb.append(replace(run, saved_config=saved_config))
        differs = compare(runs).differences
        assert compare(through_wandb).differences == differs
        shown.append({label for label in differs if label.startswith("--")})
    assert shown == [{"--notes", "--dropout"}, {"--nickname", "--dropout"}]


def test_killed_run_is_shown_as_stopped(tmp_path: Path) -> None:
    """The `status.json` of a killed run says "running", but no process holds the run's lock."""
    write_run(tmp_path / "run", status="running", global_step=0)
    (tmp_path / "run" / ".lock").touch()
    comparison = compare(read_runs([str(tmp_path / "run")]))
    assert comparison.figures[0].status == "stopped at step 40 of 40"
    assert "its process ended before it could record a reason" in notes(comparison)[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WANDB_MODE", "junk"),
        pytest.param("WANDB_BASE_URL", "http://[::1", marks=pytest.mark.slow),
        pytest.param("WANDB_API_KEY", " ", marks=pytest.mark.slow),
    ],
)
def test_invalid_wandb_variable_gives_one_sentence(
    variable: str, value: str, forking_python: Path, tmp_path: Path
) -> None:
    """It names the variable.

    The test needs a process of its own, because W&B remembers settings.
    """
    script = tmp_path / "script.py"
    code = "from common.tools.compare.readers.sources import read_runs; read_runs(['some/project'])"
    script.write_text(code)
    environment = {**os.environ, variable: value}
    words = [str(forking_python), str(script)]
    answer = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert answer.returncode == 1
    assert answer.stderr.startswith(
        "error: there is no folder some/project, and it can't be read as a W&B project"
    )
    assert len(answer.stderr.splitlines()) == 1
    assert variable in answer.stderr or "a WANDB_* variable" in answer.stderr


def test_control_characters_are_escaped_in_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such characters may occur in names of runs, reasons and values of flags."""
    names = ["\x1b[31mred", "two\x9b"]
    sources = [
        write_run(
            tmp_path / name,
            {"environment.device": f"a {name}", "config.label_column": name},
            status="failed",
            reason=f"of {name}",
        )
        for name in names
    ]
    comparison = compare(read_runs(sources))
    show(comparison)
    shown = capsys.readouterr().out
    for text in (shown, as_markdown(comparison)):
        assert "\\x1b[31mred" in text
        assert not {"\x1b", "\x9b"} & {*text}


def test_settings_decide_whether_a_pair_is_fair(tmp_path: Path) -> None:
    """A recipe that was edited during the run does; another text of the recipe does not."""
    edited = {"global_step": 7, "sha256": "1" * 64, "file": "recipe-1.py"}
    sources = [
        write_run(tmp_path / "first", {"source": {"sha256": "0" * 64}}),
        write_run(tmp_path / "second", {"source": {"sha256": "1" * 64}}),
        write_run(tmp_path / "third", {"source": {"sha256": "0" * 64, "changes": [edited]}}),
    ]
    comparison = compare(read_runs(sources))
    assert comparison.differences == {
        "text of the recipe": ["0" * 8, "1" * 8, "0" * 8],
        "recipe changed": [None, None, "at update 7"],
    }
    (difference,) = comparison.unfair_differences
    assert (difference.run, difference.label) == ("third", "recipe changed")


def test_each_figure_has_one_row() -> None:
    """A comparison lists no figure twice."""
    assert len({*FIGURES}) == len(FIGURES)
