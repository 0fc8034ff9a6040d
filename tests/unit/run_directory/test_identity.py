"""A resume notices a `config.json` that was edited, or that belongs to another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common.checkpoints.folders import step_folders
from common.checkpoints.tensors import read_metadata
from common.errors import UserError
from common.storage.digests import signed
from tests.small_run import FLAGS, run, unfinished_run

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_all_files_name_their_run(tmp_path: Path) -> None:
    """All files of a run have its `run_id`, so a copied file is recognised."""
    directory = tmp_path / "run"
    assert run(*FLAGS, "--eval-every", 1, "--output-dir", directory)[0] is None
    newest = step_folders(directory / "checkpoints")[-1]
    names = ("config.json", "status.json", "model/model.json")
    files = [*(directory / name for name in names), newest / "manifest.json"]
    run_ids = {json.loads(path.read_text())["run_id"] for path in files}
    bests = [*(directory / "checkpoints").glob("best-*")]
    assert bests
    run_ids |= {read_metadata(path)["run_id"] for path in bests}
    assert len(run_ids) == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [("seed", 5), ("dropout", 0.5), ("max_grad_norm", 9.0), ("learning_rate", 0.1)],
)
def test_flag_edited_in_config_is_refused(tmp_path: Path, flag: str, value: float) -> None:
    """The sentence has both values. With the original file, the run resumes."""
    directory = unfinished_run(tmp_path / "run")
    text = (directory / "config.json").read_text()
    facts = json.loads(text)
    before = facts["config"][flag]
    facts["config"][flag] = value
    (directory / "config.json").write_text(json.dumps(facts))
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    spelled = flag.replace("_", "-")
    assert f"after the run wrote it (--{spelled} was {before} and is {value} now" in error.message
    (directory / "config.json").write_text(text)
    assert run("--resume", directory, "--log-every", 1)[0] is None


@pytest.mark.parametrize("has_digest", [True, False], ids=["with a digest", "without a digest"])
def test_config_with_another_id_is_refused(has_digest: bool, tmp_path: Path) -> None:
    """The run keeps its checkpoints; once the original file is back, the run resumes."""
    directory = unfinished_run(tmp_path / "run")
    path = directory / "config.json"
    text = path.read_text()
    facts = json.loads(text)
    run_id = facts["run_id"]
    facts["run_id"] = "0123456789abcdef"
    if not has_digest:
        del facts["sha256"]
    path.write_text(json.dumps(facts))
    checkpoints = [path.name for path in step_folders(directory / "checkpoints")]
    for flags in (("--resume", directory), ("--output-dir", directory, "--resume", "auto")):
        error, _ = run(*flags)
        assert isinstance(error, UserError)
        assert "0123456789abcdef" in error.message
        assert run_id in error.message
        assert "restore " in error.message
        assert [path.name for path in step_folders(directory / "checkpoints")] == checkpoints
    path.write_text(text)
    assert run("--resume", directory)[0] is None


def test_config_of_another_run_is_refused(tmp_path: Path) -> None:
    """The digest of the file is right, but the checkpoints belong to another run."""
    directory = unfinished_run(tmp_path / "run")
    other = unfinished_run(tmp_path / "other", "--seed", 4)
    shutil.copy(other / "config.json", directory / "config.json")
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert (
        f"restore the config.json of the run that wrote {directory}/checkpoints/" in error.message
    )
    assert step_folders(directory / "checkpoints")


def test_status_of_another_run_finishes_nothing(tmp_path: Path) -> None:
    """The `status.json` of another, finished run does not make this run count as finished."""
    directory = unfinished_run(tmp_path / "run")
    other = tmp_path / "other"
    assert run(*FLAGS, "--output-dir", other)[0] is None
    shutil.copy(other / "status.json", directory / "status.json")
    error, output = run("--resume", directory)
    assert error is None
    assert "resuming" in output
    assert (directory / "summary.json").exists()


def test_config_edited_before_the_first_checkpoint_is_refused(tmp_path: Path) -> None:
    """A resume refuses an edited `config.json`, but another run may start with its flags."""
    directory = unfinished_run(tmp_path / "run")
    shutil.rmtree(directory / "checkpoints")
    path = directory / "config.json"
    facts = json.loads(path.read_text())
    facts["config"]["seed"] = 5
    path.write_text(json.dumps(facts))
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert "was edited after the run wrote it" in error.message
    advice = "leave --resume out and start a new run in another directory with its flags"
    assert f"{advice}: --config {path}" in error.message
    other = tmp_path / "other"
    assert run("--config", path, "--output-dir", other)[0] is None
    assert json.loads((other / "config.json").read_text())["config"]["seed"] == 5


def test_edited_config_is_not_passed_over_by_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume auto` refuses an edited config instead of starting another run beside it."""
    monkeypatch.chdir(tmp_path)
    directory = unfinished_run(tmp_path / "runs" / "mine")
    path = directory / "config.json"
    facts = json.loads(path.read_text())
    facts["config"]["seed"] = 5
    path.write_text(json.dumps(facts))
    flags = (*FLAGS, "--eval-every", 1, "--checkpoint-every", 1)
    error, _ = run(*flags, "--resume", "auto")
    assert isinstance(error, UserError)
    assert "(--seed was 0 and is 5 now)" in error.message
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["run_id", "sha256"])
def test_config_without_its_id_or_digest_is_refused(name: str, tmp_path: Path) -> None:
    """A run writes both, so the file was edited. With the original file, the run resumes."""
    directory = unfinished_run(tmp_path / "run")
    path = directory / "config.json"
    text = path.read_text()
    facts = json.loads(text)
    del facts[name]
    path.write_text(json.dumps(facts))
    checkpoints = [path.name for path in step_folders(directory / "checkpoints")]
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    reason = "its SHA-256 is missing" if name == "sha256" else "its run_id is None, but that of"
    assert f"{path} was edited after the run wrote it ({reason}" in error.message
    assert [path.name for path in step_folders(directory / "checkpoints")] == checkpoints
    path.write_text(text)
    assert run("--resume", directory)[0] is None


def test_signed_config_without_an_id_is_refused(tmp_path: Path) -> None:
    """With a new id, the run would put its own checkpoints aside."""
    directory = unfinished_run(tmp_path / "run")
    path = directory / "config.json"
    facts = json.loads(path.read_text())
    del facts["run_id"]
    path.write_text(json.dumps(signed(facts)))
    checkpoints = [path.name for path in step_folders(directory / "checkpoints")]
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert f"{path} belongs to run None, but {directory}/checkpoints/" in error.message
    assert [path.name for path in step_folders(directory / "checkpoints")] == checkpoints
