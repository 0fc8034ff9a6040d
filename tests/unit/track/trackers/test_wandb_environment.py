"""The variables of W&B: its mode, and the folder that it writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.track.trackers import wandb_environment
from common.track.trackers.wandb_environment import wandb_folder, wandb_mode

KEY = "0badc0de" * 5  # W&B expects a key of this length


@pytest.mark.parametrize("mode", ["disabled", "offline", "online"])
def test_wandb_mode_is_honoured(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WANDB_MODE` decides, with or without a key."""
    monkeypatch.setenv("WANDB_MODE", mode)
    for key in ("", KEY):
        monkeypatch.setenv("WANDB_API_KEY", key)
        assert wandb_mode()[0] == mode


@pytest.mark.parametrize("ending", ["file", "file/folder", "nul\0"])
def test_wandb_dir_that_cannot_be_written_is_reported(
    ending: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """W&B itself would silently use a folder for temporary files."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(wandb_environment.os, "environ", {"WANDB_DIR": f"{tmp_path}/{ending}"})
    assert wandb_folder(tmp_path / "run") == tmp_path / "run"
    output = capsys.readouterr().out
    assert output.startswith("WANDB_DIR ")
    assert output.endswith(f"W&B writes to {tmp_path}/run\n")
    assert "\0" not in output


def test_wandb_dir_that_can_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WANDB_DIR is created if it is missing, and nothing is left in it."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "new"))
    assert wandb_folder(tmp_path / "run") == tmp_path / "new"
    assert not [*(tmp_path / "new").iterdir()]
    assert capsys.readouterr().out == ""
