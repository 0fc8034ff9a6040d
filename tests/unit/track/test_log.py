"""Failing trackers, modes of W&B, and its panels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from common.config import TrainingConfig
from common.data.images import StreamedImages
from common.data.text import StreamedText
from common.measure.sums import Evaluation
from common.run_directory.records import ImageFormat
from common.track.log import Log
from common.track.trackers import TRACKERS
from common.track.trackers.tracker import Command, Tracker, TrackerSettingsError
from common.track.trackers.wandb_environment import wandb_mode
from common.track.trackers.wandb_panels import confusion, content_reader

KEY = "0badc0de" * 5  # W&B expects a key of this length


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
    log.file = (folder / "metrics.jsonl").open("a")
    log.position = lambda: {"progress/global_step": 1.0}
    return log


def test_confusion_of_many_classes_lists_pairs() -> None:
    """The most frequent confusions are listed where a matrix would be too large."""
    counts = torch.eye(100) * 5
    counts[3, 4] = 2
    counts[70, 2] = 9
    table = confusion(counts, [f"class {i}" for i in range(100)])
    assert table.data == [["class 70", "class 2", 9], ["class 3", "class 4", 2]]


def test_streamed_samples_are_not_shown(tmp_path: Path) -> None:
    """They are not stored, so there is no table of mistakes."""
    rows: Any = SimpleNamespace(blocks=None)
    data: Any = SimpleNamespace(tokenizer_folder=tmp_path)
    decode: Any = None  # nothing is decoded
    image_format = ImageFormat(channels=1, image_size=8, mean=[0.5], std=[0.25])
    images = StreamedImages(rows, decode, image_format, torch.float32)
    assert content_reader(images, data) is None
    assert content_reader(StreamedText(rows, tmp_path, 8, None), data) is None


def test_failing_panel_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics are still sent."""
    tracker = Refusing()
    log = log_with(tracker, tmp_path)
    log.attach(lambda tracker: tracker.log_model(Path("picture")))
    assert log.tracker is tracker
    assert "picture is too large" in capsys.readouterr().out
    log.finish({})


def test_each_choice_of_a_tracker_has_a_class() -> None:
    """Each choice of `--tracker` has a class, except none."""
    choices = get_args(get_type_hints(TrainingConfig)["tracker"])
    assert [*TRACKERS, "none"] == [*choices]


@pytest.mark.parametrize("mode", ["disabled", "offline", "online"])
def test_wandb_mode_is_honoured(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WANDB_MODE` decides, with or without a key."""
    monkeypatch.setenv("WANDB_MODE", mode)
    for key in ("", KEY):
        monkeypatch.setenv("WANDB_API_KEY", key)
        assert wandb_mode()[0] == mode


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
        position = {"progress/global_step": step, "progress/epoch": 0.5}
        evaluation = Evaluation({"accuracy": accuracy})
        log.evaluation(evaluation, split, is_best=False, position=position)
        return len(capsys.readouterr().out.splitlines())

    assert [lines_of(0.5), lines_of(0.5)] == [1, 0]
    assert [lines_of(float("nan")), lines_of(float("nan"))] == [1, 0]
    assert lines_of(0.5000001) == 1
    assert lines_of(0.5, split="test") == 1
    assert lines_of(0.5, step=2.0) == 1
    log.finish({})
