"""`recipes compare` on real runs, and on folders that hold none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.errors import UserError
from common.tools.compare.command import main
from common.tools.compare.comparison import compare as compare_runs
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.warnings_and_notes import notes
from common.tools.workspace import metrics_of_panels
from tests.launch import Finished, Runner, clean_environment, run_command

FLAGS = (
    *("--dataset", "digits", "--epochs", 2, "--batch-size", 128, "--hidden-sizes", 32),
    *("--log-every", 5),
)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> dict[str, Finished]:
    """Three runs: fp32, bf16, and one of twice the effective batch."""
    variants: dict[str, tuple[object, ...]] = {
        "fp32": ("--mixed-precision", "no"),
        "bf16": ("--mixed-precision", "bf16", "--tracker", "none"),
        "large": ("--mixed-precision", "no", "--gradient-accumulation-steps", 2),
    }
    variants["large"] += ("--tracker", "none")
    return {
        name: runner.shared("mnist_mlp", *FLAGS, *flags, "--run-name", name)
        for name, flags in variants.items()
    }


def compare(runner: Runner, *words: object) -> tuple[int, str, str]:
    """Run the command as a user does; return its status, output and errors."""
    command = [str(runner.python), "-m", "common.tools", "compare", *map(str, words)]
    return run_command(command, clean_environment(runner.folder), runner.folder, 120, one_core=True)


@pytest.mark.slow
def test_figures_and_ratios_are_those_of_the_runs(
    runner: Runner, runs: dict[str, Finished], tmp_path: Path
) -> None:
    """Each figure is the one of its run. Only the unfair pair is flagged."""
    picture = tmp_path / "runs.png"
    directories = [run.directory for run in runs.values()]
    status, output, errors = compare(runner, *directories, "--json", "--plot", picture)
    assert status == 0, errors
    comparison: dict[str, Any] = json.loads(output)
    assert comparison["baseline"] == "fp32"
    summaries = [run.summary for run in runs.values()]
    for run, summary in zip(comparison["runs"], summaries, strict=True):
        speed = summary["perf/samples_per_second"]
        assert run["perf/samples_per_second"] == speed
        base = summaries[0]["perf/samples_per_second"]
        assert run["throughput_ratio"] == pytest.approx(speed / base)
        assert run["final"]["accuracy"] == summary["test/accuracy"]
        assert run["time/train_seconds"] == summary["time/train_seconds"]
        assert 0 < run["seconds_to_target"] <= run["time/train_seconds"]
    assert [(warning["run"], warning["what"]) for warning in comparison["unfair"]] == [
        ("large", "effective batch")
    ]
    assert comparison["runs"][1]["differs"]["precision"] == "bf16"
    assert [group["runs"] for group in comparison["groups"]] == [["fp32"], ["bf16"], ["large"]]
    verdicts = comparison["verdicts"]
    assert {verdict["figure"] for verdict in verdicts} == {"final accuracy, test", "throughput"}
    assert {verdict["distinguishable"] for verdict in verdicts} == {None}  # single runs
    assert all("repeat both" in verdict["text"] for verdict in verdicts)
    for run, summary in zip(comparison["runs"], summaries, strict=True):
        share = summary["test/accuracy"] * (1 - summary["test/accuracy"])
        error = (share / summary["test/count"]) ** 0.5
        assert run["final_standard_error"] == pytest.approx(error)
        # Runs that are too short have no figure for the load of other programs.
        assert 0 <= summary.get("perf/other_cpu_fraction", 0) <= 1
    with Image.open(picture) as image:
        assert image.width > 1000


def test_table_is_for_people(runs: dict[str, Finished], capsys: pytest.CaptureFixture[str]) -> None:
    """The table has names, ratios and the warning, both for the terminal and in Markdown."""
    directories = [str(run.directory) for run in runs.values()]
    for form in ([], ["--markdown"]):
        main([*directories, *form])
        output = capsys.readouterr().out
        assert "fp32 and large: effective batch 128 and 256" in output
        assert "fp32 (baseline)" in output
        assert "×)" in output
        assert "standard error, 360 samples" in output
        assert "MFU" in output
        assert "(of the measured fp32 peak)" in output


@pytest.mark.usefixtures("forking_python")
def test_offline_folder_of_wandb_says_the_same(runs: dict[str, Finished]) -> None:
    """W&B's offline file has the same rows, facts and summary as the run's directory."""
    run = runs["fp32"]
    (folder,) = run.wandb_folder.glob("wandb/offline-run-*")
    ours, theirs = read_runs([str(run.directory), str(folder)])
    assert theirs.status == "finished"
    # W&B gets neither the flags of the command line nor its own id nor digests.
    not_sent = {"given_flags": {}, "wandb_run_id": "", "sha256": None, "initial_weights": None}
    assert theirs.saved_config == ours.saved_config.model_copy(update=not_sent)
    assert [row["progress/global_step"] for row in theirs.rows] == [
        row["progress/global_step"] for row in ours.rows
    ]
    for our_row, their_row in zip(ours.rows, theirs.rows, strict=True):
        assert {name: their_row[name] for name in our_row} == pytest.approx(our_row)
    # W&B's summary also has the best values and the contents of its panels.
    summary = {name: theirs.summary[name] for name in ours.summary}
    assert summary == pytest.approx(ours.summary)


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_offline_folder_that_was_cut_short(runs: dict[str, Finished], tmp_path: Path) -> None:
    """A file that a kill cut short gives the rows it holds, or an error that names its folder."""
    (file,) = runs["fp32"].wandb_folder.glob("wandb/offline-run-*/*.wandb")
    whole = file.read_bytes()
    cut = tmp_path / "run-cut.wandb"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    (run,) = read_runs([str(tmp_path)])
    assert (run.status, run.summary) == ("running", {})
    assert len(run.rows) > 0
    for length in (0, 5, 1000):
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=str(tmp_path)):
            read_runs([str(tmp_path)])


@pytest.mark.slow
def test_view_at_wandb_shows_all_that_is_logged(learned_mlp: Finished) -> None:
    """Every metric that a run logs has a panel, except plain counts and times."""
    logged = {name for row in learned_mlp.metrics for name in row}
    shown: set[str] = set()
    for panels in metrics_of_panels([]).values():
        for names in panels.values():
            shown.update(names)
    left = {name for name in logged - shown if not name.startswith(("progress/", "time/"))}
    assert left <= {"val/count", "test/count", "val/best_accuracy"}


def test_unfinished_run_is_shown_as_one(runs: dict[str, Finished], tmp_path: Path) -> None:
    """A run without a summary is compared by its log and marked as unfinished."""
    directory = tmp_path / "stopped"
    directory.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (directory / name).write_bytes((runs["fp32"].directory / name).read_bytes())
    status = {"status": "preempted", "reason": "stopped by SIGTERM", "global_step": 22}
    (directory / "status.json").write_text(json.dumps(status))
    comparison = compare_runs(read_runs([str(runs["bf16"].directory), str(directory)]))
    assert comparison.figures[1].status.startswith("preempted at step 22")
    assert (comparison.figures[1].metrics["perf/samples_per_second"] or 0) > 0
    assert any("SIGTERM" in note for note in notes(comparison))
