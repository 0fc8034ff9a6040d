"""Taking a run's directory: never overwritten, and used by one job at a time."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import PartialState

from common.errors import UserError
from common.run_directory import taking
from common.run_directory.taking import TakenDirectory, make_directory, require_shared_folder
from common.storage.files import LOCK, locked
from tests.unit.recipes import (
    config_class,
    resolved_config,
    saved_contents,
    status_of,
    take_directory,
    write_run,
)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as one process in its own folder."""
    PartialState(cpu=True)
    monkeypatch.chdir(tmp_path)


def test_runs_of_one_second_have_distinct_directories(tmp_path: Path) -> None:
    """Runs that start at the same time never share a directory."""
    paths = [take_directory(None, recipe="resnet").path.resolve() for _ in range(20)]
    assert len(set(paths)) == 20
    assert all(path.parent == tmp_path / "runs" for path in paths)
    assert all(path.name.startswith("resnet-") for path in paths)


def test_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    """An `--output-dir` that holds a run is refused, and the run stays unchanged."""
    write_run(tmp_path, resolved_config(), status=None)
    with pytest.raises(UserError, match=r"already contains a run.*--resume auto"):
        take_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    take_directory(tmp_path, resume=True).release()


@pytest.mark.parametrize(
    ("status", "recipe", "problem", "resumes"),
    [
        ("running", "mnist_mlp", "it already contains a run$", True),
        ("failed", "mnist_mlp", "it already contains a run$", True),
        (None, "mnist_mlp", "it already contains a run$", True),
        ("finished", "mnist_mlp", "it already contains a run, which is finished$", False),
        ("failed", "bert", "it already contains a run of another recipe, bert$", False),
    ],
)
def test_advice_fits_the_run_that_is_there(
    status: str | None, recipe: str, problem: str, resumes: bool, tmp_path: Path
) -> None:
    """`--resume auto` is named only if it would continue the run."""
    write_run(tmp_path, config_class(recipe)(), recipe, status=status)
    with pytest.raises(UserError) as refused:
        take_directory(tmp_path)
    assert re.search(problem, refused.value.problem)
    assert ("--resume auto" in refused.value.advice) == resumes


@pytest.mark.parametrize("contents", ["{}", "[]", "{", '{"hidden_size": 4}'])
@pytest.mark.parametrize("has_status", [True, False])
def test_config_of_something_else_is_no_run(
    contents: str, has_status: bool, tmp_path: Path
) -> None:
    """A damaged file beside a `status.json` is a run's; another one may be a model's."""
    (tmp_path / "config.json").write_text(contents)
    if has_status:
        (tmp_path / "status.json").write_text("{}")
    problem = (
        "already contains a run" if has_status else r"a config\.json that is not a run's: pass"
    )
    with pytest.raises(UserError, match=problem) as refused:
        take_directory(tmp_path)
    assert ("--resume" in refused.value.advice) == has_status


@pytest.mark.parametrize("status", ["running", "failed", "finished"])
def test_folder_of_runs_is_refused(status: str, tmp_path: Path) -> None:
    """A run's files would lie beside the folders of other runs."""
    write_run(tmp_path / "runs" / "first", resolved_config(), status=status)
    with pytest.raises(UserError, match=r"folders of other runs, such as first") as refused:
        take_directory("runs")
    assert refused.value.advice == "pass a folder of its own, such as --output-dir runs/NAME"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]
    take_directory(tmp_path / "runs" / "second").release()


def test_folder_of_other_files_is_accepted(tmp_path: Path) -> None:
    """A folder of models, or an unfinished start, is in nobody's way."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "status.json").write_text("{}")
    take_directory(tmp_path).release()


@pytest.mark.parametrize("path", ["/proc/self", "file/run", "x" * 300, "/dev/null"])
def test_impossible_directory_gives_one_sentence(path: str) -> None:
    """The system may refuse it for any reason."""
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"--output-dir .* can't be made or written"):
        make_directory(path, "mnist_mlp", is_resumed=False)
    with pytest.raises(UserError, match=r"--output-dir .* can't be made or written"):
        take_directory(path)
    with pytest.raises(UserError, match=r"^(?!--output-dir).* can't be made or written"):
        make_directory(path, "mnist_mlp", is_resumed=True)


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_file_in_place_of_runs_gives_one_sentence(obstacle: str) -> None:
    """Neither a traceback nor an endless search for another name follows."""
    if obstacle == "file":
        Path("runs").write_text("")
    else:
        Path("runs").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{Path('runs').absolute()} can't be made"):
        take_directory(None)


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
        require_shared_folder(tmp_path / "mark", timeout=0, is_resumed=resume)
    assert refused.value.advice == advice


def test_two_jobs_never_write_to_one_directory(tmp_path: Path) -> None:
    """The second job is refused while the first one runs, and allowed afterwards."""
    first = take_directory(tmp_path)
    lock = tmp_path / LOCK
    with pytest.raises(UserError, match="another job is writing to"), locked(lock, timeout=0):
        pass
    with pytest.raises(UserError, match=r"another job is writing to .* ended, or stop it$"):
        take_directory(tmp_path, resume=True)
    with pytest.raises(UserError, match=r"another job is writing to .* another --output-dir$"):
        take_directory(tmp_path)
    first.release()
    with locked(lock, timeout=0):
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
        take_directory("asked")
    assert refused.value.message == "no such place"
    assert 5 in waited
    answer = [TakenDirectory(Path("asked"), "0123", Path("asked", ".seen-0"))]
    other = take_directory("asked")
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
    take_directory("shared").release()
    assert not [*tmp_path.glob("shared/.seen-*")]
    others = ["rank 1 on there"]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, *others])
    for output_dir in ("mine", None):
        with pytest.raises(UserError, match="all machines share: rank 1 on there can't see"):
            take_directory(output_dir)
    assert not [*tmp_path.glob("runs/*")]
    with locked(tmp_path / "mine" / LOCK, timeout=0):
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_directory_is_checked_again_under_its_lock(
    resume: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job that waited for another one does not overwrite what that job created."""

    @contextlib.contextmanager
    def waited(path: Path, timeout: float, flag: str | None) -> Iterator[None]:
        write_run(tmp_path, resolved_config(seed=4), status="finished")
        yield

    monkeypatch.setattr(taking, "locked", waited)
    if resume:
        with pytest.raises(SystemExit) as end:
            take_directory(tmp_path, resume=True)
        assert end.value.code == 0
        assert "is finished, so there is nothing to resume" in capsys.readouterr().out
    else:
        with pytest.raises(UserError, match="already contains a run"):
            take_directory(tmp_path)
    assert status_of(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("status", ["running", "failed"])
def test_run_that_was_replaced_is_not_resumed(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this job waited for the lock, another run with another seed took the run's place."""

    @contextlib.contextmanager
    def waited(path: Path, timeout: float, flag: str | None) -> Iterator[None]:
        write_run(tmp_path, resolved_config(seed=4), status=status)
        yield

    monkeypatch.setattr(taking, "locked", waited)
    with pytest.raises(UserError, match=r"another run replaced .*--seed 4, which was 0"):
        take_directory(tmp_path, resume=True)
    assert status_of(tmp_path)["status"] == status


def test_checkpoints_without_a_config_are_not_overwritten(tmp_path: Path) -> None:
    """Somebody removed the file, but the checkpoints may be valuable."""
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(UserError, match="contains checkpoints of another run"):
        take_directory(tmp_path)


def test_run_keeps_its_identity(tmp_path: Path) -> None:
    """A resume finds it in `config.json`, even if `status.json` is damaged."""
    first = take_directory(tmp_path)
    first.write("config.json", saved_contents(resolved_config()) | {"run_id": first.run_id})
    first.release()
    (tmp_path / "status.json").write_text("{}")
    again = take_directory(tmp_path, resume=True)
    assert again.run_id == first.run_id
    assert status_of(tmp_path)["run_id"] == first.run_id
