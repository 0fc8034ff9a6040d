"""`recipes tune` with a real recipe: the command in its last line repeats the best trial."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from common.tools.tune.command import main
from tests.launch import REPOSITORY

pytestmark = pytest.mark.usefixtures("restored_sigterm")


@pytest.mark.slow
def test_printed_command_gives_the_figures_of_the_best_trial(
    forking_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command repeats the best trial to the last bit.

    It has each flag of the trial, also those that the search adds.
    """
    flags = ["--learning-rate", "0.003:0.03:log", "--hidden-sizes", "16", "--max-steps", "12"]
    flags += ["--eval-every", "6", "--tracker", "none"]
    recipe = str(REPOSITORY / "recipes" / "mnist_mlp.py")
    main([recipe, *flags, "--trials", "2", "--study", str(tmp_path / "study")])
    *_, best, command = capsys.readouterr().out.splitlines()
    python, *words = shlex.split(command)
    assert python == "python"
    again = tmp_path / "again"
    words += ["--output-dir", str(again), "--tracker", "none"]
    subprocess.run([forking_python, *words], check=True, capture_output=True, timeout=300)
    trial = tmp_path / "study" / best.split()[1].rstrip(",")
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (again, trial))
    names = [name for name in theirs if name.startswith(("val/", "test/", "train/"))]
    assert "val/best_accuracy" in names
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    weights = "model/model.safetensors"
    assert (again / weights).read_bytes() == (trial / weights).read_bytes()
