"""The log of a run: trackers that fail, and evaluations that are printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from common.config import TrainingConfig
from common.measure.sums import Evaluation
from common.track.log import Log
from common.track.trackers import TRACKERS
from common.track.trackers.tracker import Command, Tracker, TrackerSettingsError


class Refusing(Tracker):
    """A tracker whose calls fail."""

    native = None
    commands: list[Command] = []

    def __init__(self) -> None:
        """Start without a run."""

    def log(self, row: object) -> None:
        """Fail."""
        raise ConnectionError("no route")

    def log_media(self, entry: object) -> None:
        """Fail."""
        raise ConnectionError("no route")

    def log_model(self, folder: Path) -> None:
        """Fail."""
        raise ValueError(f"{folder} is too large")

    def finish(self, summary: object, exit_code: int) -> None:
        """Do nothing."""


def log_with(tracker: Tracker, folder: Path) -> Log:
    """Return an open log at its first step."""
    accelerator: Any = SimpleNamespace(is_main_process=True, num_processes=1)
    log = Log(accelerator, folder)
    log.tracker = tracker
    log.metrics_file = (folder / "metrics.jsonl").open("a")
    log.current_position = lambda: {"progress/global_step": 1.0}
    return log


def test_failing_panel_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics are still sent."""
    tracker = Refusing()
    log = log_with(tracker, tmp_path)
    log.send_to_tracker(lambda tracker: tracker.log_model(Path("picture")))
    assert log.tracker is tracker
    assert "picture is too large" in capsys.readouterr().out
    log.finish({})


def test_each_choice_of_a_tracker_has_a_class() -> None:
    """Each choice of `--tracker` has a class, except none."""
    choices = get_args(get_type_hints(TrainingConfig)["tracker"])
    assert [*TRACKERS, "none"] == [*choices]


def test_failing_tracker_never_stops_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker that raises is no longer used, but the file continues."""
    log = log_with(Refusing(), tmp_path)
    log.add({"train/loss": 1.0})
    log.write_row()
    assert log.tracker is None
    log.add({"train/loss": float("nan")})
    log.write_row()
    log.finish({})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["train/loss"] for line in lines] == [1.0, None]
    assert "no route" in capsys.readouterr().out


def test_malformed_setting_of_a_tracker_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence says what to correct, without a class's name, and the run continues."""
    log = log_with(Refusing(), tmp_path)
    with log.tracking():
        raise TrackerSettingsError("W&B rejects WANDB_MODE='junk'", "correct or unset WANDB_MODE")
    assert log.tracker is None
    expected = (
        "metrics are written to metrics.jsonl only and not to a tracker, because W&B rejects "
        "WANDB_MODE='junk': correct or unset WANDB_MODE\n"
    )
    assert capsys.readouterr().out == expected
    log.finish({})


def test_evaluation_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another split, step or value is another evaluation, even where its text is the same."""
    log = log_with(Refusing(), tmp_path)

    def lines_of(accuracy: float, split: str = "validation", step: float = 1.0) -> int:
        model_position = {"progress/global_step": step, "progress/epoch": 0.5}
        evaluation = Evaluation({"accuracy": accuracy})
        log.add_evaluation(evaluation, split, is_best=False, model_position=model_position)
        return len(capsys.readouterr().out.splitlines())

    assert [lines_of(0.5), lines_of(0.5)] == [1, 0]
    assert [lines_of(float("nan")), lines_of(float("nan"))] == [1, 0]
    assert lines_of(0.5000001) == 1
    assert lines_of(0.5, split="test") == 1
    assert lines_of(0.5, step=2.0) == 1
    log.finish({})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device, which is full")
@pytest.mark.parametrize("name", ["metrics_file", "output_file"])
def test_full_disk_does_not_prevent_the_end(name: str, tmp_path: Path) -> None:
    """What could not be written before is tried again when the file is closed."""
    log = log_with(Refusing(), tmp_path)
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115, as `finish` closes it
    full.write("a line")
    setattr(log, name, full)
    log.finish(exit_code=1)
    assert full.closed


@pytest.mark.parametrize("is_training_run", [True, False])
def test_evaluated_model_has_no_position_and_is_not_the_best(
    is_training_run: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that only evaluates has made no update, and has no other model to compare with."""
    log = log_with(Refusing(), tmp_path)
    log.current_position = lambda: {"progress/global_step": 0.0, "progress/epoch": 0.0}
    log.is_training_run = is_training_run
    log.add_evaluation({"loss": 0.5, "count": 10}, "validation", is_best=True)
    line = capsys.readouterr().out
    assert ("★ best" in line) == is_training_run
    assert ("step 0" in line) == is_training_run
    assert "validation of 10: loss 0.5" in line
