"""The directory of a run in progress: its files and its status, even if it was removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest
from accelerate import PartialState

from common.errors import UserError
from common.failures.outcomes import Outcome
from common.lifecycle import saving, training_figures
from common.lifecycle.stages import StartedRun
from common.run_directory.records import Status
from common.run_directory.status import read_status, write_refusal
from tests.small_run import FLAGS, run
from tests.unit.recipes import resolved_config, saved_contents, status_of, take_directory, write_run

REFUSED = Outcome("failed", False, "wrong flags")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as one process in its own folder."""
    PartialState(cpu=True)
    monkeypatch.chdir(tmp_path)


def test_unused_unnamed_directory_is_removed() -> None:
    """A directory that the user named stays, and so does one with contents."""
    unused, used = (take_directory(None, recipe="bert") for _ in range(2))
    named = take_directory("asked", recipe="bert")
    used.write("config.json", {})
    for directory in (unused, used, named):
        directory.write_status("failed", 0)
        directory.remove_if_unused()
    assert not unused.path.exists()
    assert used.path.exists()
    assert named.path.exists()


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_run_whose_directory_is_gone_writes_no_more(way: str, tmp_path: Path) -> None:
    """Such a run neither creates its directory again nor writes into another run's."""
    path = tmp_path / "run"
    directory = take_directory(path)
    directory.write("config.json", {"run_id": directory.run_id})
    directory.write("memory.json", {})
    shutil.rmtree(path)
    if way == "replaced":
        path.mkdir()
        (path / "config.json").write_text('{"run_id": "another"}')
    with pytest.raises(UserError, match="was removed, moved or replaced while the run wrote"):
        directory.write("summary.json", {})
    assert not (path / "summary.json").exists()


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(("module", "name"), [(training_figures, "log_interval"), (saving, "save")])
def test_run_whose_folder_is_removed_fails(
    module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with one sentence, and makes no new folder that looks like a run."""
    directory = tmp_path / "run"
    original = getattr(module, name)

    def remove(started: StartedRun) -> None:
        if started.context.progress.global_step == 2:
            shutil.rmtree(directory)
        original(started)

    monkeypatch.setattr(module, name, remove)
    error, _ = run(*FLAGS, "--output-dir", directory)
    assert isinstance(error, UserError)
    assert "was removed, moved or replaced while the run wrote to it: start" in error.message
    assert "--resume" not in error.message
    assert not directory.exists()


@pytest.mark.parametrize("status", ["running", "preempted", "finished"])
def test_status_is_the_last_one_written(status: str, tmp_path: Path) -> None:
    """All but a finished run are resumable."""
    directory = take_directory(tmp_path)
    directory.write_status("running", 1)
    directory.write_status(status, 3, "a reason")
    resumable = status != "finished"
    expected = {"status": status, "resumable": resumable, "reason": "a reason", "global_step": 3}
    expected |= {"run_id": directory.run_id}
    assert read_status(tmp_path).to_json() == status_of(tmp_path) == expected


def test_first_failure_of_any_rank_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures that follow from it do not replace it."""
    directory = take_directory(tmp_path)
    contents = saved_contents(resolved_config()) | {"run_id": directory.run_id}
    directory.write("config.json", contents)
    directory.write_status("running", 1)
    monkeypatch.setenv("RANK", "1")
    assert directory.write_failure(
        Outcome("failed", True, "rank 1: lost"), 4, is_lost_process=False
    )
    assert not directory.write_failure(
        Outcome("failed", False, "rank 0: closed by peer"), 5, is_lost_process=False
    )
    assert status_of(tmp_path) == {
        "status": "failed", "resumable": True, "reason": "rank 1: lost", "global_step": 4,
        "run_id": directory.run_id,
    }  # fmt: skip
    monkeypatch.delenv("RANK")
    directory.release()
    again = take_directory(tmp_path, resume=True)
    assert status_of(tmp_path)["status"] == "running"
    assert status_of(tmp_path)["global_step"] == 4
    assert again.write_failure(Outcome("failed", False, "another"), 6, is_lost_process=False)


def test_failure_counts_even_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, the reason must still be printed."""
    directory = take_directory(tmp_path)

    def fail(path: Path, value: object) -> None:
        raise UserError(f"{path} can't be made or written")

    monkeypatch.setattr("common.run_directory.status.write_json", fail)
    assert directory.write_failure(Outcome("failed", False, "why"), 4, is_lost_process=False)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"status": "run', b"\xff"])
def test_unreadable_status_is_unknown(content: bytes | None, tmp_path: Path) -> None:
    """A run may be killed at any moment, and can still be resumed."""
    write_run(tmp_path, resolved_config(), status=None)
    if content is not None:
        (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path) == Status()
    write_refusal(tmp_path, REFUSED, is_resumed=True)
    assert read_status(tmp_path) == Status()
    directory = take_directory(tmp_path, resume=True)
    assert status_of(tmp_path)["global_step"] == 0
    directory.release()


@pytest.mark.parametrize("status", ["running", "preempted", "failed"])
def test_wrong_command_stops_the_supervisor(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run, another rank, and a run that trains under a right command are left alone."""
    directory = take_directory(tmp_path)
    directory.write_status(status, 4)
    write_refusal(tmp_path, REFUSED, is_resumed=True)
    assert status_of(tmp_path)["status"] == status
    directory.release()
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")
        write_refusal(tmp_path, REFUSED, is_resumed=True)
        assert status_of(tmp_path)["status"] == status
    write_refusal(tmp_path, REFUSED, is_resumed=True)
    assert status_of(tmp_path) == {
        "status": "failed", "resumable": False, "reason": "wrong flags", "global_step": 4,
        "run_id": directory.run_id,
    }  # fmt: skip
    directory.write_status("finished", 9)
    write_refusal(tmp_path, REFUSED, is_resumed=True)
    assert status_of(tmp_path)["status"] == "finished"


def test_second_loss_at_the_same_update_is_not_resumable(tmp_path: Path) -> None:
    """A restart helps after the first loss, or after one at another update."""
    lost = Outcome("failed", True, "rank 1: RuntimeError: gloo: Connection closed by peer")
    write_run(tmp_path / "run", resolved_config(), "mine", status=None)
    is_resumable_after_each = []
    for step, is_lost_process in ((40, True), (41, True), (40, False), (40, True)):
        directory = take_directory(tmp_path / "run", recipe="mine", resume=True)
        assert directory.write_failure(lost, step, is_lost_process=is_lost_process)
        is_first = directory.write_failure(lost, step, is_lost_process=is_lost_process)
        assert not is_first, "another rank has said it"
        status = read_status(directory.path)
        is_resumable_after_each.append(status.resumable)
        directory.release()
    assert is_resumable_after_each == [True, True, True, False]
    assert "second time at update 40" in str(status.reason)
    assert "gloo" in str(status.reason)
    directory = take_directory(tmp_path / "run", recipe="mine", resume=True)
    directory.write_status("finished", 80)
    assert read_status(directory.path).lost_at_steps == []
    directory.release()
