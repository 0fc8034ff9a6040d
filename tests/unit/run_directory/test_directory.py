"""A run's directory: never written over, of one job alone, and saying how the run stands."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import PartialState

from common.errors import Outcome, UserError
from common.files import locked
from common.run_directory import directory as module
from common.run_directory.directory import (
    LOCK,
    RunDirectory,
    make_directory,
    read_status,
    refuse_to_resume,
)
from common.run_directory.records import Status
from tests.unit.recipes import status_of

REFUSED = Outcome("failed", False, "wrong flags")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, in a folder of the test's own, that waits for no other job."""
    PartialState(cpu=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "PATIENCE", 0)


# Made.


def test_runs_of_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    """Runs that start at once never share a directory."""
    paths = [RunDirectory(None, "resnet", False).path.resolve() for _ in range(20)]
    assert len(set(paths)) == 20
    assert all(path.parent == tmp_path / "runs" for path in paths)
    assert all(path.name.startswith("resnet-") for path in paths)


def test_run_directory_is_never_written_over(tmp_path: Path) -> None:
    """An `--output-dir` that holds a run is refused, and the run stays as it was."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a run, which is kept.*--resume auto"):
        RunDirectory(str(tmp_path), "mnist_mlp", False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    RunDirectory(str(tmp_path), "mnist_mlp", True).release()


@pytest.mark.parametrize("path", ["/proc/self", "file/run", "x" * 300, "/dev/null"])
def test_directory_that_cannot_be_written_is_a_sentence(path: str) -> None:
    """Whatever the system's reason is: nothing can be created there."""
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"--output-dir .* can't be made or written"):
        make_directory(path, "mnist_mlp", resume=False)
    with pytest.raises(UserError, match=r"--output-dir .* can't be made or written"):
        RunDirectory(path, "mnist_mlp", resume=False)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_runs_that_is_no_folder_is_a_sentence(kind: str) -> None:
    """Neither a traceback, nor another name tried for ever."""
    Path("runs").write_text("") if kind == "file" else Path("runs").symlink_to("nowhere")
    with pytest.raises(UserError, match="can't be made"):
        RunDirectory(None, "mnist_mlp", False)


def test_unused_directory_is_removed_if_nobody_named_it() -> None:
    """One that was asked for stays, and one that holds anything."""
    unused, used = (RunDirectory(None, "bert", False) for _ in range(2))
    asked = RunDirectory("asked", "bert", False)
    used.write("config.json", {})
    for directory in (unused, used, asked):
        directory.write_status("failed", 0)
        directory.remove_if_unused()
    assert not unused.path.exists()
    assert used.path.exists()
    assert asked.path.exists()


# Of one job.


def test_two_jobs_never_write_to_one_directory(tmp_path: Path) -> None:
    """The second is told who is there; after the first, it may."""
    first = RunDirectory(str(tmp_path), "mnist_mlp", False)
    lock = tmp_path / LOCK
    with pytest.raises(UserError, match="another job writes to"), locked(lock, patience=0):
        pass
    with pytest.raises(UserError, match="another job writes to"):
        RunDirectory(str(tmp_path), "mnist_mlp", True)
    first.release()
    with locked(lock, patience=0):
        pass


def test_other_ranks_hear_of_the_first_ones_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They make nothing, wait until it is said, and end as it does."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    answer: list[object] = []

    def hear(values: list[object]) -> None:
        assert values == [None], "only rank 0 has something to say"
        values[:] = answer

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", hear)
    answer = [UserError("no such place")]
    with pytest.raises(UserError) as refused:
        RunDirectory("asked", "mnist_mlp", False)
    assert refused.value.message == "no such place"
    assert 5 in waited
    answer = [module.Taken(Path("asked"), "0123", Path("asked", ".seen-0"), False)]
    other = RunDirectory("asked", "mnist_mlp", False)
    assert (other.path, other.run_id) == (Path("asked"), "0123")
    other.write_status("running", 0)
    other.write("config.json", {})
    assert not [*tmp_path.iterdir()]


def test_machine_that_does_not_see_the_directory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the start, whatever it has under that name itself; one that sees it is quiet."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("accelerate.utils.gather_object", list)
    RunDirectory("shared", "mnist_mlp", False).release()
    assert not [*tmp_path.glob("shared/.seen-*")]
    others = ["rank 1 on there"]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, *others])
    for asked in ("mine", None):
        with pytest.raises(UserError, match="all machines share: rank 1 on there can't see"):
            RunDirectory(asked, "mnist_mlp", False)
    assert not [*tmp_path.glob("runs/*")]
    with locked(tmp_path / "mine" / LOCK, patience=0):
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_directory_is_looked_at_again_under_its_lock(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waited for another one does not take over what that one made meanwhile."""

    @contextlib.contextmanager
    def waited(path: Path, patience: float) -> Iterator[None]:
        (tmp_path / "config.json").write_text('{"run_id": "its"}')
        (tmp_path / "status.json").write_text('{"status": "finished"}')
        yield

    monkeypatch.setattr(module, "locked", waited)
    if resume:
        with pytest.raises(SystemExit) as end:
            RunDirectory(str(tmp_path), "mnist_mlp", True, 0, lambda: True)
        assert end.value.code == 0
    else:
        with pytest.raises(UserError, match="holds a run, which is kept"):
            RunDirectory(str(tmp_path), "mnist_mlp", False)
    assert (tmp_path / "status.json").read_text() == '{"status": "finished"}'


def test_checkpoints_without_a_config_are_no_place_for_another_run(tmp_path: Path) -> None:
    """Somebody removed the file; the checkpoints may still be worth a month."""
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(UserError, match="holds checkpoints of a run, which are kept"):
        RunDirectory(str(tmp_path), "mnist_mlp", False)


@pytest.mark.parametrize("lost", ["config.json", "status.json", "both"])
def test_run_keeps_its_identity(lost: str, tmp_path: Path) -> None:
    """Over all attempts; a file that lacks it, as of an older version, takes it from the others."""
    first = RunDirectory(str(tmp_path), "mnist_mlp", False)
    first.write("config.json", {"run_id": first.run_id})
    first.release()
    manifest = tmp_path / "checkpoints" / "step-00000003" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"run_id": first.run_id}))
    for name in ("config.json", "status.json"):
        if lost in (name, "both"):
            (tmp_path / name).write_text("{}")
    again = RunDirectory(str(tmp_path), "mnist_mlp", True)
    assert again.run_id == first.run_id
    assert status_of(tmp_path)["run_id"] == first.run_id


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_run_whose_directory_is_gone_writes_no_more(way: str, tmp_path: Path) -> None:
    """Neither into nothing, nor into another run."""
    path = tmp_path / "run"
    directory = RunDirectory(str(path), "mnist_mlp", False)
    directory.write("config.json", {"run_id": directory.run_id})
    directory.write("memory.json", {})
    shutil.rmtree(path)
    if way == "replaced":
        path.mkdir()
        (path / "config.json").write_text('{"run_id": "another"}')
    with pytest.raises(UserError, match="was removed, moved or replaced while the run wrote"):
        directory.write("summary.json", {})
    assert not (path / "summary.json").exists()


# How it stands.


@pytest.mark.parametrize("status", ["running", "preempted", "finished"])
def test_status_is_what_was_said_last(status: str, tmp_path: Path) -> None:
    """Resumable where a restart goes on."""
    directory = RunDirectory(str(tmp_path), "mnist_mlp", False)
    directory.write_status("running", 1)
    directory.write_status(status, 3, "a reason")
    resumable = status != "finished"
    expected = {"status": status, "resumable": resumable, "reason": "a reason", "global_step": 3}
    expected |= {"run_id": directory.run_id}
    assert read_status(tmp_path).to_json() == status_of(tmp_path) == expected


def test_first_rank_to_fail_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rank may; the failures that follow from it are not its reason."""
    directory = RunDirectory(str(tmp_path), "mnist_mlp", False)
    directory.write_status("running", 1)
    monkeypatch.setenv("RANK", "1")
    assert directory.write_failure(Outcome("failed", True, "rank 1: lost"), 4)
    assert not directory.write_failure(Outcome("failed", False, "rank 0: closed by peer"), 5)
    assert status_of(tmp_path) == {
        "status": "failed", "resumable": True, "reason": "rank 1: lost", "global_step": 4,
        "run_id": directory.run_id,
    }  # fmt: skip
    monkeypatch.delenv("RANK")
    directory.release()
    again = RunDirectory(str(tmp_path), "mnist_mlp", True)
    assert status_of(tmp_path)["status"] == "running"
    assert status_of(tmp_path)["global_step"] == 4
    assert again.write_failure(Outcome("failed", False, "another"), 6)


def test_failure_is_told_where_it_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the reason is still to be printed."""
    directory = RunDirectory(str(tmp_path), "mnist_mlp", False)

    def fail(path: Path, value: object) -> None:
        raise UserError(f"{path} can't be made or written")

    monkeypatch.setattr(module, "write_json", fail)
    assert directory.write_failure(Outcome("failed", False, "why"), 4)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"status": "run', b"\xff"])
def test_status_that_can_not_be_read_says_nothing(content: bytes | None, tmp_path: Path) -> None:
    """A run may be killed at any moment, and go on all the same."""
    if content is not None:
        (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path) == Status()
    refuse_to_resume(tmp_path, REFUSED)
    assert read_status(tmp_path) == Status()
    directory = RunDirectory(str(tmp_path), "mnist_mlp", True)
    assert status_of(tmp_path)["global_step"] == 0
    directory.release()


@pytest.mark.parametrize("status", ["running", "preempted", "failed"])
def test_command_that_can_not_go_on_ends_a_supervisors_loop(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not on a finished run, by another rank, or while a right command trains there."""
    directory = RunDirectory(str(tmp_path), "mnist_mlp", False)
    directory.write_status(status, 4)
    refuse_to_resume(tmp_path, REFUSED)
    assert status_of(tmp_path)["status"] == status
    directory.release()
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")
        refuse_to_resume(tmp_path, REFUSED)
        assert status_of(tmp_path)["status"] == status
    refuse_to_resume(tmp_path, REFUSED)
    assert status_of(tmp_path) == {
        "status": "failed", "resumable": False, "reason": "wrong flags", "global_step": 4,
        "run_id": directory.run_id,
    }  # fmt: skip
    directory.write_status("finished", 9)
    refuse_to_resume(tmp_path, REFUSED)
    assert status_of(tmp_path)["status"] == "finished"


def test_second_loss_at_an_update_is_no_accident(tmp_path: Path) -> None:
    """The first one is mended by a restart; one at another update is a first one, too."""
    lost = Outcome("failed", True, "rank 1: RuntimeError: gloo: Connection closed by peer")
    ends = []
    for step, is_loss in ((40, True), (41, True), (40, False), (40, True)):
        directory = RunDirectory(str(tmp_path / "run"), "mine", True)
        assert directory.write_failure(lost, step, is_loss)
        assert not directory.write_failure(lost, step, is_loss), "another rank has said it"
        status = read_status(directory.path)
        ends.append(status.resumable)
        directory.release()
    assert ends == [True, True, True, False]
    assert "second time at update 40" in str(status.reason)
    assert "gloo" in str(status.reason)
    directory = RunDirectory(str(tmp_path / "run"), "mine", True)
    directory.write_status("finished", 80)
    assert read_status(directory.path).lost_at_steps == []
    directory.release()
