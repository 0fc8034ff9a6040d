"""The tests under `tests/gpu/` notice a run that did not use the GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints.store import Checkpoints
from tests.gpu import launching, test_checkpoints
from tests.gpu.launching import Launcher
from tests.launch import REPOSITORY, Runner, clean_environment
from tests.unit.checkpoint_store import checkpoints_in

# Leaves what the launcher reads of a run that used a device, and then works on until it is killed.
STAND_IN = """
import json, sys, time
from pathlib import Path
device_type, directory = sys.argv[1], Path(sys.argv[2])
directory.mkdir()
(directory / "config.json").write_text(json.dumps({"environment": {"device_type": device_type}}))
(directory / "status.json").write_text('{"status": "finished"}')
(directory / "checkpoints" / "step-00000005").mkdir(parents=True)
time.sleep(float(sys.argv[3]))
"""
IMPORT_ALL = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
os.environ["CUDA_VISIBLE_DEVICES"] = "3"
from pathlib import Path
for path in sorted(Path(sys.argv[1], "tests", "gpu").glob("*.py")):
    __import__(f"tests.gpu.{path.stem}")
print(json.dumps(["tests.conftest" in sys.modules, os.environ["CUDA_VISIBLE_DEVICES"]]))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Return a script that pretends to have trained on a device."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return script


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_launch_fails_unless_it_used_the_device(
    device_type: str, stand_in: Path, tmp_path: Path
) -> None:
    """The launcher of the GPU tests accepts a run on a GPU and fails for one on a CPU."""
    launcher = Launcher(tmp_path, "cuda")
    finished = tmp_path / "finished"
    killed = tmp_path / "killed"
    if device_type == "cuda":
        launcher.run(stand_in, device_type, finished, 0, directory=finished)
        launcher.kill_after_checkpoint(stand_in, device_type, killed, 60, directory=killed, step=5)
        return
    with pytest.raises(AssertionError, match="the run used cpu"):
        launcher.run(stand_in, device_type, finished, 0, directory=finished)
    with pytest.raises(AssertionError, match="the run used cpu"):
        launcher.kill_after_checkpoint(stand_in, device_type, killed, 60, directory=killed, step=5)


def test_launches_keep_packages_that_were_brought_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch puts the repository before the folders that PYTHONPATH already has."""
    monkeypatch.setenv("PYTHONPATH", "/brought/along")
    assert launching.environment()["PYTHONPATH"] == f"{REPOSITORY}{os.pathsep}/brought/along"
    monkeypatch.delenv("PYTHONPATH")
    assert launching.environment()["PYTHONPATH"] == str(REPOSITORY)


def test_imports_leave_the_gpus_visible(runner: Runner, tmp_path: Path) -> None:
    """No module of `tests/gpu/` may import `tests/conftest.py`, which hides them."""
    script = tmp_path / "import_all.py"
    script.write_text(IMPORT_ALL)
    environment = clean_environment(runner.folder)
    path = tmp_path / "output"
    with path.open("w") as output:
        words = [str(script), str(REPOSITORY)]
        process = runner.start(words, "fork", environment, tmp_path, output, output)
        assert process.wait(120) == 0, path.read_text()
    assert json.loads(path.read_text().splitlines()[-1]) == [False, "3"]


def test_checkpoint_test_copies_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU test of checkpoints gives `Checkpoints` the device.

    On the CPU, `Checkpoints` copies with neither streams nor pinned memory.
    """
    device = torch.device("cpu", 0)
    devices: list[torch.device] = []

    def noting(*arguments: Any, **named: Any) -> Checkpoints:
        checkpoints = checkpoints_in(*arguments, **named)
        devices.append(checkpoints.device)
        return checkpoints

    monkeypatch.setattr(test_checkpoints, "default_device", lambda: device)
    monkeypatch.setattr(test_checkpoints, "checkpoints_in", noting)
    test_checkpoints.test_checkpoint_holds_values_of_its_moment(tmp_path)
    assert devices == [device]
