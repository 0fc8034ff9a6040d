"""Run directories: never overwritten, used by one job at a time, and with the run's status."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import PartialState

from common.errors import UserError
from common.failures.outcomes import Outcome
from common.run_directory import directory as module
from common.run_directory.directory import RunDirectory, make_directory, require_shared_folder
from common.run_directory.records import Status
from common.run_directory.status import read_status, write_refusal
from common.storage.files import LOCK, locked
from tests.unit.recipes import status_of

REFUSED = Outcome("failed", False, "wrong flags")


def directory_of(output_dir: str | None, recipe: str, resume: bool) -> RunDirectory:
    """Return the directory of a run that is not finished, without waiting for other jobs."""
    return RunDirectory(output_dir, recipe, resume, patience=0, is_finished=lambda: False)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as one process in its own folder, without waiting for other jobs."""
    PartialState(cpu=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "PATIENCE", 0)


# Creation.


def test_runs_of_one_second_have_distinct_directories(tmp_path: Path) -> None:
    """Runs that start at the same time never share a directory."""
    paths = [directory_of(None, "resnet", False).path.resolve() for _ in range(20)]
    assert len(set(paths)) == 20
    assert all(path.parent == tmp_path / "runs" for path in paths)
    assert all(path.name.startswith("resnet-") for path in paths)


def test_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    """An `--output-dir` that holds a run is refused, and the run stays unchanged."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"already contains a run.*--resume auto"):
        directory_of(str(tmp_path), "mnist_mlp", False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    directory_of(str(tmp_path), "mnist_mlp", True).release()


@pytest.mark.parametrize("path", ["/proc/self", "file/run", "x" * 300, "/dev/null"])
def test_impossible_directory_gives_one_sentence(path: str) -> None:
    """The system may refuse it for any reason."""
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"--output-dir .* can't be made or written"):
        make_directory(path, "mnist_mlp", resume=False)
    with pytest.raises(UserError, match=r"--output-dir .* can't be made or written"):
        directory_of(path, "mnist_mlp", resume=False)
    with pytest.raises(UserError, match=r"^(?!--output-dir).* can't be made or written"):
        make_directory(path, "mnist_mlp", resume=True)


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_file_in_place_of_runs_gives_one_sentence(obstacle: str) -> None:
    """Neither a traceback nor an endless search for another name follows."""
    if obstacle == "file":
        Path("runs").write_text("")
    else:
        Path("runs").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{Path('runs').absolute()} can't be made"):
        directory_of(None, "mnist_mlp", False)


def test_unused_unnamed_directory_is_removed() -> None:
    """A directory that the user named stays, and so does one with contents."""
    unused, used = (directory_of(None, "bert", False) for _ in range(2))
    named = directory_of("asked", "bert", False)
    used.write("config.json", {})
    for directory in (unused, used, named):
        directory.write_status("failed", 0)
        directory.remove_if_unused()
    assert not unused.path.exists()
    assert used.path.exists()
    assert named.path.exists()


@pytest.mark.parametrize(
    ("resume", "advice"),
    [
        (False, "pass an --output-dir on a file system that all machines share"),
        (True, "move this run to a file system that all machines share, and resume it there"),
    ],
)
def test_machine_without_the_directory_is_named(resume: bool, advice: str, tmp_path: Path) -> None:
    """A run is resumed in its own directory, so another `--output-dir` would be refused."""
    with pytest.raises(UserError, match=r"rank 0 on .* can't see what rank 0 writes") as refused:
        require_shared_folder(tmp_path / "mark", patience=0, resume=resume)
    assert refused.value.advice == advice


# One job at a time.


def test_two_jobs_never_write_to_one_directory(tmp_path: Path) -> None:
    """The second job is refused while the first one runs, and allowed afterwards."""
    first = directory_of(str(tmp_path), "mnist_mlp", False)
    lock = tmp_path / LOCK
    with pytest.raises(UserError, match="another job is writing to"), locked(lock, patience=0):
        pass
    with pytest.raises(UserError, match=r"another job is writing to .* ended, or stop it$"):
        directory_of(str(tmp_path), "mnist_mlp", True)
    with pytest.raises(UserError, match=r"another job is writing to .* another --output-dir$"):
        directory_of(str(tmp_path), "mnist_mlp", False)
    first.release()
    with locked(lock, patience=0):
        pass


def test_other_ranks_fail_with_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They create nothing, wait until rank 0 printed the message, and fail alike."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    answer: list[object] = []

    def broadcast(values: list[object]) -> None:
        assert values == [None], "only rank 0 has something to say"
        values[:] = answer

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", broadcast)
    answer = [UserError("no such place")]
    with pytest.raises(UserError) as refused:
        directory_of("asked", "mnist_mlp", False)
    assert refused.value.message == "no such place"
    assert 5 in waited
    answer = [module.TakenDirectory(Path("asked"), "0123", Path("asked", ".seen-0"), False)]
    other = directory_of("asked", "mnist_mlp", False)
    assert (other.path, other.run_id) == (Path("asked"), "0123")
    other.write_status("running", 0)
    other.write("config.json", {})
    assert not [*tmp_path.iterdir()]


def test_machine_that_does_not_share_the_directory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error comes at the start. A machine that sees the directory stays silent."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("accelerate.utils.gather_object", list)
    directory_of("shared", "mnist_mlp", False).release()
    assert not [*tmp_path.glob("shared/.seen-*")]
    others = ["rank 1 on there"]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, *others])
    for output_dir in ("mine", None):
        with pytest.raises(UserError, match="all machines share: rank 1 on there can't see"):
            directory_of(output_dir, "mnist_mlp", False)
    assert not [*tmp_path.glob("runs/*")]
    with locked(tmp_path / "mine" / LOCK, patience=0):
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_directory_is_checked_again_under_its_lock(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waited for another one does not overwrite what that job created."""

    @contextlib.contextmanager
    def waited(path: Path, patience: float, flag: str | None) -> Iterator[None]:
        (tmp_path / "config.json").write_text('{"run_id": "its"}')
        (tmp_path / "status.json").write_text('{"status": "finished"}')
        yield

    monkeypatch.setattr(module, "locked", waited)
    if resume:
        with pytest.raises(SystemExit) as end:
            RunDirectory(str(tmp_path), "mnist_mlp", True, 0, lambda: True)
        assert end.value.code == 0
    else:
        with pytest.raises(UserError, match="already contains a run"):
            directory_of(str(tmp_path), "mnist_mlp", False)
    assert (tmp_path / "status.json").read_text() == '{"status": "finished"}'


def test_checkpoints_without_a_config_are_not_overwritten(tmp_path: Path) -> None:
    """Somebody removed the file, but the checkpoints may be valuable."""
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(UserError, match="contains checkpoints of another run"):
        directory_of(str(tmp_path), "mnist_mlp", False)


def test_run_keeps_its_identity(tmp_path: Path) -> None:
    """A resume finds it in `config.json`, even if `status.json` is damaged."""
    first = directory_of(str(tmp_path), "mnist_mlp", False)
    first.write("config.json", {"run_id": first.run_id})
    first.release()
    (tmp_path / "status.json").write_text("{}")
    again = directory_of(str(tmp_path), "mnist_mlp", True)
    assert again.run_id == first.run_id
    assert status_of(tmp_path)["run_id"] == first.run_id


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_run_whose_directory_is_gone_writes_no_more(way: str, tmp_path: Path) -> None:
    """Such a run neither creates its directory again nor writes into another run's."""
    path = tmp_path / "run"
    directory = directory_of(str(path), "mnist_mlp", False)
    directory.write("config.json", {"run_id": directory.run_id})
    directory.write("memory.json", {})
    shutil.rmtree(path)
    if way == "replaced":
        path.mkdir()
        (path / "config.json").write_text('{"run_id": "another"}')
    with pytest.raises(UserError, match="was removed, moved or replaced while the run wrote"):
        directory.write("summary.json", {})
    assert not (path / "summary.json").exists()


# Status.


@pytest.mark.parametrize("status", ["running", "preempted", "finished"])
def test_status_is_the_last_one_written(status: str, tmp_path: Path) -> None:
    """All but a finished run are resumable."""
    directory = directory_of(str(tmp_path), "mnist_mlp", False)
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
    directory = directory_of(str(tmp_path), "mnist_mlp", False)
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
    again = directory_of(str(tmp_path), "mnist_mlp", True)
    assert status_of(tmp_path)["status"] == "running"
    assert status_of(tmp_path)["global_step"] == 4
    assert again.write_failure(Outcome("failed", False, "another"), 6, is_lost_process=False)


def test_failure_counts_even_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, the reason must still be printed."""
    directory = directory_of(str(tmp_path), "mnist_mlp", False)

    def fail(path: Path, value: object) -> None:
        raise UserError(f"{path} can't be made or written")

    monkeypatch.setattr(module, "write_json", fail)
    assert directory.write_failure(Outcome("failed", False, "why"), 4, is_lost_process=False)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"status": "run', b"\xff"])
def test_unreadable_status_is_unknown(content: bytes | None, tmp_path: Path) -> None:
    """A run may be killed at any moment, and can still be resumed."""
    if content is not None:
        (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path) == Status()
    write_refusal(tmp_path, REFUSED, resume=True)
    assert read_status(tmp_path) == Status()
    directory = directory_of(str(tmp_path), "mnist_mlp", True)
    assert status_of(tmp_path)["global_step"] == 0
    directory.release()


@pytest.mark.parametrize("status", ["running", "preempted", "failed"])
def test_wrong_command_stops_the_supervisor(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run, another rank, and a run that trains under a right command are left alone."""
    directory = directory_of(str(tmp_path), "mnist_mlp", False)
    directory.write_status(status, 4)
    write_refusal(tmp_path, REFUSED, resume=True)
    assert status_of(tmp_path)["status"] == status
    directory.release()
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")
        write_refusal(tmp_path, REFUSED, resume=True)
        assert status_of(tmp_path)["status"] == status
    write_refusal(tmp_path, REFUSED, resume=True)
    assert status_of(tmp_path) == {
        "status": "failed", "resumable": False, "reason": "wrong flags", "global_step": 4,
        "run_id": directory.run_id,
    }  # fmt: skip
    directory.write_status("finished", 9)
    write_refusal(tmp_path, REFUSED, resume=True)
    assert status_of(tmp_path)["status"] == "finished"


def test_second_loss_at_the_same_update_is_not_resumable(tmp_path: Path) -> None:
    """A restart helps after the first loss, or after one at another update."""
    lost = Outcome("failed", True, "rank 1: RuntimeError: gloo: Connection closed by peer")
    is_resumable_after_each = []
    for step, is_lost_process in ((40, True), (41, True), (40, False), (40, True)):
        directory = directory_of(str(tmp_path / "run"), "mine", True)
        assert directory.write_failure(lost, step, is_lost_process=is_lost_process)
        is_first = directory.write_failure(lost, step, is_lost_process=is_lost_process)
        assert not is_first, "another rank has said it"
        status = read_status(directory.path)
        is_resumable_after_each.append(status.resumable)
        directory.release()
    assert is_resumable_after_each == [True, True, True, False]
    assert "second time at update 40" in str(status.reason)
    assert "gloo" in str(status.reason)
    directory = directory_of(str(tmp_path / "run"), "mine", True)
    directory.write_status("finished", 80)
    assert read_status(directory.path).lost_at_steps == []
    directory.release()
