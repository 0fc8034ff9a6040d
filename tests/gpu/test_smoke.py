"""Each recipe once, as short as possible: run this first on a new machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import as_flags
from tests.gpu.launching import Launcher
from tests.launch import RECIPES, REPOSITORY

STEPS = 40
TIME_RECORDER = REPOSITORY / "tests" / "record_times.py"


@pytest.mark.parametrize("recipe", RECIPES)
def test_smoke_recipe_trains_is_killed_and_resumes(
    recipe: str,
    launcher: Launcher,
    small: Callable[[str], dict[str, object]],
    half: str,
    tmp_path: Path,
) -> None:
    """On the device, in 16 bits, with checkpoints that are written during training."""
    script = REPOSITORY / "recipes" / f"{recipe}.py"
    directory = tmp_path / "run"
    settings = {
        **small(recipe),
        "max_steps": STEPS,
        "epochs": 99,
        "checkpoint_every": 5,
        "log_every": 5,
        "mixed_precision": half,
        "tracker": "none",
        "output_dir": directory,
    }
    # Each update takes 50 ms longer, so that the kill comes in time.
    slow = (tmp_path / "stamps", 0, 0, 0.05, script, *as_flags(settings))
    launcher.kill_after_checkpoint(TIME_RECORDER, *slow, directory=directory, step=10)
    run = launcher.run(script, "--resume", directory, directory=directory)
    assert "resuming" in run.output + run.errors
    assert run.config["environment"]["mixed_precision"] == half
    assert max(run.series("train/loss")) == STEPS
    assert all(math.isfinite(loss) for loss in run.series("train/loss").values())
    assert (directory / "model" / "model.safetensors").exists()
