"""Checkpoints that a run saves, and the one that `--resume` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.lifecycle.saving import named_checkpoint


@pytest.mark.parametrize("name", ["first", "step-size", "step-00000120"])
def test_run_is_no_checkpoint_whatever_its_name(name: str, tmp_path: Path) -> None:
    """`--output-dir runs/step-size` is allowed, and a resume of it continues from the newest."""
    run = tmp_path / name
    checkpoint = run / "checkpoints" / "step-00000040"
    checkpoint.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    assert named_checkpoint(run) is None
    assert named_checkpoint(checkpoint) == "step-00000040"
