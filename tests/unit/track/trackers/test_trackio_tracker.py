"""The tracker trackio: what its database has after starts, kills and resumes; and no network."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
from accelerate import Accelerator
from PIL import Image

from common.config import TrainingConfig
from common.metric_names import STEP
from common.run_directory.records import RunConfig
from common.track.log import Log
from common.track.recorded_media import HistogramEntry, ImagesEntry, TableEntry
from common.track.trackers.tracker import TrackedRun
from common.track.trackers.trackio_tracker import TrackioTracker
from tests.trackio_stand_in import stand_in
from tests.unit.saved_config import contents_with

Row = dict[str, float]


def real_trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the real package anew, so that it reads the folder of its data."""
    pytest.importorskip("trackio", reason='trackio is not installed: pip install "trackio>=0.43"')
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    import trackio

    return trackio


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.slow)])
def trackio(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for the package, or the package, with an empty folder for its data."""
    folder = tmp_path / "trackio"
    if request.param == "real":
        return real_trackio(folder, monkeypatch)
    module = stand_in(folder)
    for name in ("trackio", "trackio.fragments", "trackio.sqlite_storage"):
        monkeypatch.setitem(sys.modules, name, module)
    return module


def start(directory: Path, earlier: list[Row], step: int, **flags: Any) -> TrackioTracker:
    """Start or resume the run of a directory; the directory's name is the run's id."""
    config = TrainingConfig(tracker="trackio", project="tests", **flags)
    facts = contents_with(run_id=f"id-of-{directory}", config={"seed": 7})
    run = TrackedRun(Accelerator(cpu=True), config, RunConfig(**facts), directory, earlier, step)
    return TrackioTracker(run)


def end(tracker: TrackioTracker) -> None:
    """Write all rows. The thread of the real package would write them soon after."""
    tracker.finish({}, 0)


def row_of(step: int, attempt: int = 1) -> Row:
    """Return a row of an attempt, by which the figure of time differs."""
    return {"train/loss": 1 / (1 + step), "time/train_seconds": 10.0 * attempt, STEP: step}


def stored(trackio: Any) -> dict[str, list[Any]]:
    """Return the contents of the database: rows in order of their steps, by name of run."""
    path = trackio.sqlite_storage.SQLiteStorage.get_project_db_path("tests")
    contents: dict[str, list[Any]] = {}
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT run_name, metrics FROM metrics ORDER BY step"
        for name, row in connection.execute(query):
            contents.setdefault(name, []).append(json.loads(row))
    return contents


@pytest.mark.parametrize("written", [0, 1, 4, 6])
@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_resumed_run_has_each_row_of_the_file_once(
    trackio: Any, written: int, step: int, tmp_path: Path
) -> None:
    """A kill may lose the last rows of trackio, and comes after the checkpoint of `step`."""
    tracker = start(tmp_path / "run", [], 0)
    for number in range(written):
        tracker.log(row_of(number))
    end(tracker)
    earlier = [row_of(number) for number in range(step)]  # those that `Log` keeps in the file
    tracker = start(tmp_path / "run", earlier, step)
    repeated = [row_of(number, attempt=2) for number in range(step, 8)]
    for row in repeated:
        tracker.log(row)
    end(tracker)
    assert stored(trackio) == {"run": [*earlier, *repeated]}


def test_runs_with_one_name_stay_apart(trackio: Any, tmp_path: Path) -> None:
    """Two runs with one name are continued separately."""
    folders = [tmp_path / "mine" / "first", tmp_path / "other" / "first"]
    for attempt in (1, 2):
        for number, folder in enumerate(folders):
            earlier = [row_of(10 * number)] if attempt == 2 else []
            tracker = start(folder, earlier, 10 * number + attempt - 1)
            tracker.log(row_of(10 * number + attempt - 1))
            end(tracker)
    other_name = f"first-id-of-{folders[1]}"
    assert stored(trackio) == {
        "first": [row_of(0), row_of(1)],
        other_name: [row_of(10), row_of(11)],
    }


def test_flags_and_facts_are_the_configuration(trackio: Any, tmp_path: Path) -> None:
    """So are tags and notes; the group is trackio's own."""
    flags = {"run_name": "named", "group": "seeds", "tags": ("mine",), "notes": "why"}
    tracker = start(tmp_path / "run", [], 0, **flags)
    tracker.log(row_of(1))
    end(tracker)
    (run,) = trackio.Api().runs("tests")
    assert run.name == "named"
    expected = {"seed": 7, "recipe": "tiny", "notes": "why", "_Group": "seeds"}
    assert {name: run.config[name] for name in expected} == expected
    assert {"tiny", "mine", "cpu"} <= set(run.config["tags"])
    assert run.config["environment/world_size"] == 1


def test_nothing_is_sent_and_nothing_is_printed(
    trackio: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A login at the Hub and the address of a Space are not used, and the environment is kept."""
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    addresses = []

    def refuse(self: socket.socket, address: object) -> None:
        addresses.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    tracker = start(tmp_path / "run", [], 0)
    tracker.log(row_of(1))
    end(tracker)
    assert not addresses
    assert stored(trackio) == {"run": [row_of(1)]}
    for environment, is_offline in getattr(trackio, "started", []):
        assert "TRACKIO_SPACE_ID" not in environment
        assert is_offline
    assert os.environ["TRACKIO_SPACE_ID"] == "me/space"
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    expected = (
        "TRACKIO_SPACE_ID is ignored, because recipes track runs with trackio on this machine "
        "only\n"
    )
    assert capsys.readouterr() == (expected, "")


def test_media_are_rows_of_their_step(trackio: Any, tmp_path: Path) -> None:
    """A resumed run that repeats the step has them once."""
    picture = tmp_path / "picture.png"
    Image.new("L", (4, 4)).save(picture)
    entries = [
        ImagesEntry("val/drawn", 3, [], ["a caption"], [picture]),
        TableEntry("val/rows", 3, ["text", "error"], [["a text", 0.5]]),
        HistogramEntry("train/weights", 3, *[None] * 3, [1, 2], [0.0, 0.5, 1.0]),  # type: ignore
    ]
    for _ in range(2):
        tracker = start(tmp_path / "run", [row_of(2)], 3)
        for entry in entries:
            tracker.log_media(entry)
        tracker.log(row_of(3))
        end(tracker)
    (rows,) = stored(trackio).values()
    assert len(rows) == 5
    merged = {name: value for row in rows for name, value in row.items()}
    assert merged["val/drawn/0"]["caption"] == "a caption"
    assert merged["val/rows"]["_value"] == [{"text": "a text", "error": 0.5}]
    assert merged["train/weights"]["values"] == [1, 2]
    assert {name: merged[name] for name in row_of(3)} == row_of(3)


def warning_of_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a log prints whose tracker does not start."""
    accelerator: Any = SimpleNamespace(is_main_process=True, num_processes=1)
    log = Log(accelerator, folder)
    with log.tracking():
        start(folder / "run", [], 0)
    assert log.tracker is None
    return capsys.readouterr().out


def test_missing_package_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence has the command that installs the package, and the run continues."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert warning_of_start(tmp_path, capsys) == (
        "metrics are written to metrics.jsonl only and not to a tracker, because trackio is not "
        'installed: run pip install "trackio>=0.43"\n'
    )


@pytest.mark.usefixtures("trackio")
def test_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """trackio's own thread would lose the rows."""
    (tmp_path / "trackio").write_text("a file where the folder should be")
    assert warning_of_start(tmp_path, capsys) == (
        "metrics are written to metrics.jsonl only and not to a tracker, because trackio's folder "
        f"{tmp_path}/trackio can't be written (File exists): set TRACKIO_DIR to a folder that can "
        "be written\n"
    )
