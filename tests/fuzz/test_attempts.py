"""Several starts of one run: `status.json` is the current start's; the run stays the same one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from common.checkpoints.folders import step_folders
from common.checkpoints.tensors import read_metadata
from common.errors import UserError
from common.lifecycle import saving, training_figures
from common.lifecycle.stages import StartedRun
from common.run import Run
from common.storage.digests import signed
from common.tools.compare.comparison import compare
from common.tools.compare.readers.sources import read_runs
from common.training import precision
from examples import regression
from tests.fuzz.small_run import FLAGS, digest, run
from tests.unit.recipes import status_of

pytestmark = pytest.mark.usefixtures("quick_runs")

STALE = {"status": "failed", "resumable": True, "reason": "rank 1: lost", "global_step": 0}
MODEL = Path("model", "model.safetensors")


class Killed(BaseException):
    """Ends a run as kill -9 does: nothing catches it."""


def killed(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *flags: object) -> None:
    """Run until a function is called, and end there as if killed."""

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(where, name, kill)
        patch.setattr(Run, "__exit__", lambda self, *_: self.directory.release())
        with pytest.raises(Killed):
            run(*flags)


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
@pytest.mark.parametrize("killed_at", ["loaders", "keep", "start", "batches"])
def test_status_is_the_current_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, resume: tuple[str, ...]
) -> None:
    """A start replaces an old status at once; a mistake after a kill is not resumable."""
    (tmp_path / "status.json").write_text(json.dumps(STALE))
    flags = (*FLAGS, "--output-dir", tmp_path, *resume)
    killed(monkeypatch, Run, killed_at, *flags)
    assert status_of(tmp_path)["status"] == "running"
    assert status_of(tmp_path)["reason"] is None
    for mistake, seen in (("--larning-rate", "see its output"), ("--mixed-precision", "fp16")):
        (tmp_path / "status.json").write_text(json.dumps(STALE))
        error, _ = run(*flags, mistake, "fp16")
        assert isinstance(error, SystemExit)
        status = status_of(tmp_path)
        if resume or killed_at != "batches":  # else the status belongs to the run that exists
            assert not status["resumable"], seen
            assert seen in status["reason"]
        else:
            assert status == STALE


def test_mistake_of_another_command_says_nothing_of_a_run(tmp_path: Path) -> None:
    """A command that does not resume a run is refused, and leaves the run's status alone."""
    directory = tmp_path / "run"
    assert run(*FLAGS, "--output-dir", directory)[0] is None
    (directory / "status.json").write_text(json.dumps(STALE | {"status": "preempted"}))
    for flags in (FLAGS, (*FLAGS, "--mixed-precision", "fp16"), ("--epochs", 0)):
        error, _ = run(*flags, "--output-dir", directory)
        assert isinstance(error, UserError)
        assert status_of(directory)["status"] == "preempted"


@pytest.mark.parametrize("killed_at", ["batches", "finish"])
def test_resume_needs_nothing_but_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """A resume does not need the model of `--init-from`, even before the first checkpoint."""
    first = tmp_path / "first"
    source = tmp_path / "source"
    directory = tmp_path / "run"
    assert run(*FLAGS, "--output-dir", source)[0] is None
    flags = (*FLAGS, "--init-from", source)
    assert run(*flags, "--output-dir", first)[0] is None
    killed(monkeypatch, Run, killed_at, *flags, "--output-dir", directory)
    assert any(step_folders(directory / "checkpoints")) == (killed_at == "finish")
    shutil.rmtree(source)
    moved = directory.rename(tmp_path / "moved")
    killed(monkeypatch, Run, "finish", *flags, "--output-dir", moved, "--resume", "auto")
    assert run("--resume", moved)[0] is None
    assert digest(moved / MODEL) == digest(first / MODEL)


def test_precision_that_ran_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run keeps the precision that `auto` chose, and refuses another one by name."""
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    directory = tmp_path / "run"
    auto = (*FLAGS, "--mixed-precision", "auto")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    killed(monkeypatch, Run, "finish", *auto, "--output-dir", directory)
    (newest,) = step_folders(directory / "checkpoints")[-1:]
    assert json.loads((newest / "manifest.json").read_text())["mixed_precision"] == "bf16"
    again = ("--output-dir", directory, "--resume", "auto")
    for launcher in ("no", "fp16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
        for flags in (auto, (), ("--mixed-precision", "bf16")):
            killed(monkeypatch, Run, "finish", *again, *flags)
            facts = json.loads((directory / "config.json").read_text())
            assert facts["environment"]["mixed_precision"] == "bf16"
            assert facts["given"]["mixed_precision"] == "auto"
        error, _ = run(*again, "--mixed-precision", "no")
        assert isinstance(error, UserError)
        assert "--mixed-precision no (the run has bf16)" in error.message
    assert run(*again)[0] is None


def test_tf32_is_a_precision_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run prints and keeps tf32, and refuses a change, though Accelerate sees fp32."""
    directory = tmp_path / "run"
    tf32 = (*FLAGS, "--mixed-precision", "tf32")
    error, _ = run(*tf32, "--output-dir", directory)
    assert isinstance(error, UserError)
    assert "--mixed-precision tf32 can't be used on a CPU" in error.message
    monkeypatch.setattr(precision, "is_offered", lambda precision, use_cpu: True)
    killed(monkeypatch, Run, "finish", *tf32, "--output-dir", directory)
    facts = json.loads((directory / "config.json").read_text())
    assert facts["environment"]["mixed_precision"] == "tf32"
    (newest,) = step_folders(directory / "checkpoints")[-1:]
    assert json.loads((newest / "manifest.json").read_text())["mixed_precision"] == "tf32"
    again = ("--output-dir", directory, "--resume", "auto")
    error, _ = run(*again, "--mixed-precision", "no")
    assert isinstance(error, UserError)
    assert "--mixed-precision no (the run has tf32)" in error.message
    error, output = run(*again)
    assert error is None
    assert "; tf32\n" in output
    assert run(*FLAGS, "--output-dir", tmp_path / "other")[0] is None
    assert torch.get_float32_matmul_precision() == "highest"
    compared = compare(read_runs([str(tmp_path / "other"), str(directory)]))
    assert compared.differences["precision"] == ["fp32", "tf32"]


def test_precision_that_the_machine_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is refused, not changed, and the advice names no flag that would be refused."""
    directory = tmp_path / "run"
    killed(monkeypatch, Run, "finish", *FLAGS, "--output-dir", directory)
    facts = json.loads((directory / "config.json").read_text())
    for group in (facts["config"], facts["given"], facts["environment"]):
        group["mixed_precision"] = "fp16"  # as a GPU would have run
    (directory / "config.json").write_text(json.dumps(signed(facts)))
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert "--mixed-precision fp16 can't be used on a CPU" in error.message
    assert "pass --mixed-precision" not in error.message
    facts["config"]["mixed_precision"] = facts["environment"]["mixed_precision"] = "bf16"
    (directory / "config.json").write_text(json.dumps(signed(facts)))
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert "mixed precision changed from no to bf16: restore the run's config" in error.message


# One identity.


def unfinished(directory: Path, *flags: object) -> Path:
    """Return a run that was killed before its end, with a best model."""
    evaluated = ("--eval-every", 1, "--checkpoint-every", 1)
    error, _ = run(*FLAGS, *evaluated, *flags, "--output-dir", directory)
    assert error is None
    shutil.rmtree(directory / "model")
    (directory / "summary.json").unlink()
    (directory / "status.json").write_text('{"status": "running", "global_step": 3}')
    shutil.rmtree(step_folders(directory / "checkpoints")[-1])
    return directory


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
    directory = unfinished(tmp_path / "run")
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
    directory = unfinished(tmp_path / "run")
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
    directory = unfinished(tmp_path / "run")
    other = unfinished(tmp_path / "other", "--seed", 4)
    shutil.copy(other / "config.json", directory / "config.json")
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert (
        f"restore the config.json of the run that wrote {directory}/checkpoints/" in error.message
    )
    assert step_folders(directory / "checkpoints")


def test_status_of_another_run_finishes_nothing(tmp_path: Path) -> None:
    """The `status.json` of another, finished run does not make this run count as finished."""
    directory = unfinished(tmp_path / "run")
    other = tmp_path / "other"
    assert run(*FLAGS, "--output-dir", other)[0] is None
    shutil.copy(other / "status.json", directory / "status.json")
    error, output = run("--resume", directory)
    assert error is None
    assert "resuming" in output
    assert (directory / "summary.json").exists()


def test_config_edited_before_the_first_checkpoint_is_refused(tmp_path: Path) -> None:
    """A resume refuses an edited `config.json`, but another run may start with its flags."""
    directory = unfinished(tmp_path / "run")
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
    directory = unfinished(tmp_path / "runs" / "mine")
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
    directory = unfinished(tmp_path / "run")
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
    directory = unfinished(tmp_path / "run")
    path = directory / "config.json"
    facts = json.loads(path.read_text())
    del facts["run_id"]
    path.write_text(json.dumps(signed(facts)))
    checkpoints = [path.name for path in step_folders(directory / "checkpoints")]
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert f"{path} belongs to run None, but {directory}/checkpoints/" in error.message
    assert [path.name for path in step_folders(directory / "checkpoints")] == checkpoints


def test_lost_best_model_costs_nothing_else(tmp_path: Path) -> None:
    """The run resumes from its newest checkpoint, and a later evaluation may become the best."""
    directory = unfinished(tmp_path / "run")
    newest = step_folders(directory / "checkpoints")[-1]
    named = json.loads((newest / "manifest.json").read_text())["files"]
    (best,) = [newest / name for name in named if "best-" in name]
    content = bytearray(best.read_bytes())
    content[-1] ^= 1
    best.write_bytes(content)
    error, output = run("--resume", directory)
    assert error is None
    assert f"resuming {newest}" in output
    assert "the best model so far is lost" in output
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["progress/kept_step"] == 4
    assert summary.get("val/best_rmse") == summary["val/rmse"]


def test_changed_recipe_is_reported_recorded_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run prints the change, `config.json` records it, and `recipes compare` shows it."""
    directory = unfinished(tmp_path / "run")
    other = tmp_path / "whole"
    shutil.copytree(directory, other)
    assert run("--resume", other)[0] is None
    source = Path(regression.__file__).read_text()
    edited = tmp_path / "regression.py"
    edited.write_text(source.replace("nn.ReLU()", "nn.Tanh()"))
    with monkeypatch.context() as patch:
        patch.setattr(regression, "__file__", str(edited))
        error, output = run("--resume", directory)
    assert error is None
    assert "nn.Tanh()" in output
    changes = json.loads((directory / "config.json").read_text())["source"]["changes"]
    assert [change["global_step"] for change in changes] == [3]
    compared = compare(read_runs([str(other), str(directory)]))
    assert compared.differences["recipe changed"] == [None, "at update 3"]


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


def test_moved_clock_changes_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goodput counts elapsed seconds, even if the time of day jumps back and forth."""
    times = iter(10.0**9 * (1 + number % 2) for number in range(10**9))
    monkeypatch.setattr("time.time", lambda: next(times))
    directory = tmp_path / "run"
    assert run(*FLAGS, "--output-dir", directory)[0] is None
    goodput = json.loads((directory / "summary.json").read_text())["perf/goodput"]
    assert 1e-4 < goodput < 0.9


def test_another_objective_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best value so far belongs to the old objective, so values can't be compared."""
    flags = (*FLAGS, "--output-dir", tmp_path)
    killed(monkeypatch, Run, "finish", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(regression, "OBJECTIVE", "loss:min")
        error, _ = run("--resume", tmp_path)
    assert isinstance(error, UserError)
    assert "the objective changed from rmse:min to loss:min" in error.message
    assert run("--resume", tmp_path)[0] is None
