"""Attempts at one run: the status is the present one's, and the run stays what it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints.finished import step_folders
from common.compare.comparison import compare
from common.compare.readers import read_runs
from common.errors import UserError
from common.run import Run
from common.training import accelerator
from tests.fuzz.small_run import FLAGS, digest, prepared, run
from tests.unit.recipes import status_of

STALE = {"status": "failed", "resumable": True, "reason": "rank 1: lost", "global_step": 0}
MODEL = Path("model", "model.safetensors")


class Killed(BaseException):
    """What nothing catches, as nothing does anything after kill -9."""


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with prepared():
        yield


def killed(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *flags: object) -> None:
    """Run until a function is called, and not on."""

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(where, name, kill)
        patch.setattr(Run, "__exit__", lambda self, *_: self.directory.release())
        with pytest.raises(Killed):
            run(*flags)


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
@pytest.mark.parametrize("killed_at", ["loaders", "keep", "start", "batches"])
def test_status_is_the_present_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, resume: tuple[str, ...]
) -> None:
    """From its first moment, on a fresh start too; a mistake after a kill ends the loop."""
    (tmp_path / "status.json").write_text(json.dumps(STALE))
    flags = (*FLAGS, "--output-dir", tmp_path, *resume)
    killed(monkeypatch, Run, killed_at, *flags)
    assert status_of(tmp_path)["status"] == "running"
    assert status_of(tmp_path)["reason"] is None
    for mistake, seen in (("--larning-rate", "it printed"), ("--mixed-precision", "fp16")):
        (tmp_path / "status.json").write_text(json.dumps(STALE))
        error, _ = run(*flags, mistake, "fp16")
        assert isinstance(error, SystemExit)
        status = status_of(tmp_path)
        if resume or killed_at != "batches":  # else it is the run that is there, and not this one
            assert not status["resumable"], seen
            assert seen in status["reason"]
        else:
            assert status == STALE


def test_mistake_of_another_command_says_nothing_of_a_run(tmp_path: Path) -> None:
    """One that does not ask to go on with it, and is refused for that."""
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
    """The model that `--init-from` named may be gone, before the first checkpoint too."""
    first, source, directory = tmp_path / "first", tmp_path / "source", tmp_path / "run"
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
    """What `auto` was by the launcher's file or the machine; another one is refused by name."""
    monkeypatch.setattr(accelerator, "cpu_has_bf16", lambda: False)
    directory, auto = tmp_path / "run", (*FLAGS, "--mixed-precision", "auto")
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
    """Printed, kept and refused on a change as what it is, where Accelerate knows of fp32 alone."""
    directory, tf32 = tmp_path / "run", (*FLAGS, "--mixed-precision", "tf32")
    error, _ = run(*tf32, "--output-dir", directory)
    assert isinstance(error, UserError)
    assert "tf32 needs a CUDA GPU" in error.message
    monkeypatch.setattr(accelerator, "is_offered", lambda precision, use_cpu: True)
    killed(monkeypatch, Run, "finish", *tf32, "--output-dir", directory)
    facts = json.loads((directory / "config.json").read_text())
    assert facts["environment"]["mixed_precision"] == "tf32"
    (newest,) = step_folders(directory / "checkpoints")[-1:]
    assert json.loads((newest / "manifest.json").read_text())["mixed_precision"] == "tf32"
    again = ("--output-dir", directory, "--resume", "auto")
    error, _ = run(*again, "--mixed-precision", "no")
    assert isinstance(error, UserError)
    assert "--mixed-precision no (the run has tf32)" in error.message
    error, said = run(*again)
    assert error is None
    assert "; tf32\n" in said
    assert run(*FLAGS, "--output-dir", tmp_path / "other")[0] is None
    assert torch.get_float32_matmul_precision() == "highest"
    compared = compare(read_runs([str(tmp_path / "other"), str(directory)]))
    assert compared.differences["precision"] == ["fp32", "tf32"]


def test_precision_that_the_machine_has_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than replaced; and the advice is not a flag that would be refused in turn."""
    directory = tmp_path / "run"
    killed(monkeypatch, Run, "finish", *FLAGS, "--output-dir", directory)
    facts = json.loads((directory / "config.json").read_text())
    for group in (facts["config"], facts["given"], facts["environment"]):
        group["mixed_precision"] = "fp16"  # as a GPU would have run
    (directory / "config.json").write_text(json.dumps(facts))
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert "fp16 needs a CUDA GPU" in error.message
    assert "pass --mixed-precision" not in error.message
    facts["config"]["mixed_precision"] = facts["environment"]["mixed_precision"] = "bf16"
    (directory / "config.json").write_text(json.dumps(facts))
    error, _ = run("--resume", directory)
    assert isinstance(error, UserError)
    assert "mixed precision no, and now bf16: pass --mixed-precision" in error.message
