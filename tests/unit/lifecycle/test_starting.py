"""The start of a resumed run: what it restores, what may have changed since, and what may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from common.checkpoints.folders import step_folders
from common.errors import UserError
from common.lifecycle.start.starting import flags_changed_by_resume
from common.run import Run
from common.storage.digests import signed
from common.storage.json_files import json_safe
from common.tools.compare.comparison import compare
from common.tools.compare.readers.sources import read_runs
from common.training import precision
from examples import regression
from tests.small_run import FLAGS, digest, run, run_until_killed, unfinished_run
from tests.unit.saved_config import saved_config

pytestmark = pytest.mark.usefixtures("quick_runs")

MODEL = Path("model", "model.safetensors")


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
    run_until_killed(monkeypatch, Run, killed_at, *flags, "--output-dir", directory)
    assert any(step_folders(directory / "checkpoints")) == (killed_at == "finish")
    shutil.rmtree(source)
    moved = directory.rename(tmp_path / "moved")
    run_until_killed(monkeypatch, Run, "finish", *flags, "--output-dir", moved, "--resume", "auto")
    assert run("--resume", moved)[0] is None
    assert digest(moved / MODEL) == digest(first / MODEL)


def test_lost_best_model_costs_nothing_else(tmp_path: Path) -> None:
    """The run resumes from its newest checkpoint, and a later evaluation may become the best."""
    directory = unfinished_run(tmp_path / "run")
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


def test_lost_rows_are_reported(tmp_path: Path) -> None:
    """The weights do not need them, so the run goes on."""
    directory = unfinished_run(tmp_path / "run")
    (directory / "metrics.jsonl").unlink()
    error, output = run("--resume", directory)
    assert error is None
    assert "metrics.jsonl is missing, so the rows of the first 3 updates are lost" in output


def test_changed_recipe_is_reported_recorded_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run prints the change, `config.json` records it, and `recipes compare` shows it."""
    directory = unfinished_run(tmp_path / "run")
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
    kept_lines = (directory / "output.log").read_text()
    assert "the recipe was changed" in kept_lines  # printed before the log is opened
    assert f"resuming {directory}" in kept_lines
    changes = json.loads((directory / "config.json").read_text())["source"]["changes"]
    assert [change["global_step"] for change in changes] == [3]
    compared = compare(read_runs([str(other), str(directory)]))
    assert compared.differences["recipe changed"] == [None, "at update 3"]


def test_another_objective_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best value so far belongs to the old objective, so values can't be compared."""
    flags = (*FLAGS, "--output-dir", tmp_path)
    run_until_killed(monkeypatch, Run, "finish", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(regression, "OBJECTIVE", "loss:min")
        error, _ = run("--resume", tmp_path)
    assert isinstance(error, UserError)
    assert "the objective changed from rmse:min to loss:min" in error.message
    assert run("--resume", tmp_path)[0] is None


def test_precision_that_ran_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run keeps the precision that `auto` chose, and refuses another one by name."""
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    directory = tmp_path / "run"
    auto = (*FLAGS, "--mixed-precision", "auto")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    run_until_killed(monkeypatch, Run, "finish", *auto, "--output-dir", directory)
    (newest,) = step_folders(directory / "checkpoints")[-1:]
    assert json.loads((newest / "manifest.json").read_text())["mixed_precision"] == "bf16"
    again = ("--output-dir", directory, "--resume", "auto")
    for launcher in ("no", "fp16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
        for flags in (auto, (), ("--mixed-precision", "bf16")):
            run_until_killed(monkeypatch, Run, "finish", *again, *flags)
            facts = json.loads((directory / "config.json").read_text())
            assert facts["environment"]["mixed_precision"] == "bf16"
            assert facts["given"]["mixed_precision"] == "auto"
        error, _ = run(*again, "--mixed-precision", "no")
        assert isinstance(error, UserError)
        assert "--mixed-precision no (the run has bf16)" in error.message
    assert run(*again)[0] is None


@pytest.mark.parametrize(("ran", "changed"), [("no", {}), ("bf16", {"mixed_precision": "no"})])
def test_precision_that_auto_chose_is_no_changed_flag(ran: str, changed: dict[str, str]) -> None:
    """A resume states the precision that `auto` chose."""
    config = regression.Config(mixed_precision="no")
    flags = json_safe(vars(config)) | {"mixed_precision": "auto"}
    earlier = saved_config(config=flags, environment={"mixed_precision": ran})
    assert flags_changed_by_resume(config, earlier) == changed


def test_tf32_is_a_precision_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run prints and keeps tf32, and refuses a change, though Accelerate sees fp32."""
    directory = tmp_path / "run"
    tf32 = (*FLAGS, "--mixed-precision", "tf32")
    error, _ = run(*tf32, "--output-dir", directory)
    assert isinstance(error, UserError)
    assert "--mixed-precision tf32 can't be used on a CPU" in error.message
    monkeypatch.setattr(precision, "is_offered", lambda precision, use_cpu: True)
    run_until_killed(monkeypatch, Run, "finish", *tf32, "--output-dir", directory)
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
    run_until_killed(monkeypatch, Run, "finish", *FLAGS, "--output-dir", directory)
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
