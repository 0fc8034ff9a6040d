"""The launcher's command, for advice that a user can paste."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.system.launcher import UNKNOWN_LAUNCHER, command_before, launcher_command

OPTIONS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))))
RECIPE = "recipes/a recipe.py"


@given(OPTIONS, OPTIONS)
def test_words_before_the_recipe_are_kept(options: list[str], flags: list[str]) -> None:
    """Options of the launcher are quoted; flags of the recipe are left out."""
    options = [option for option in options if option != RECIPE]
    words = ["/bin/python3", "/venv/bin/accelerate", "launch", *options, RECIPE, *flags]
    assert shlex.split(command_before(words, RECIPE)) == ["accelerate", "launch", *options]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["python", "-m", "torch.distributed.run", RECIPE], "python -m torch.distributed.run"),
        (["bash", "job.sh"], UNKNOWN_LAUNCHER),
        ([RECIPE], UNKNOWN_LAUNCHER),
        ([], UNKNOWN_LAUNCHER),
    ],
)
def test_other_launchers(words: list[str], command: str) -> None:
    assert command_before(words, RECIPE) == command


def test_single_process_needs_python_alone() -> None:
    assert launcher_command(RECIPE) == "python"


def test_command_is_that_of_the_parent(tmp_path: Path) -> None:
    """A real parent with the recipe among its words is read."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import sys\n"
        "from common.system.launcher import launcher_command\n"
        "print(launcher_command(sys.argv[0]))\n"
    )
    launcher = tmp_path / "torchrun"
    launcher.write_text(
        "import os, subprocess, sys\n"
        "environment = os.environ | {'WORLD_SIZE': '2', 'PYTHONPATH': os.getcwd()}\n"
        "subprocess.run([sys.executable, *sys.argv[2:]], env=environment, check=True)\n"
    )
    command = [sys.executable, str(launcher), "--two", str(recipe), "--flag"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert (answer.stdout, answer.stderr) == ("torchrun --two\n", "")
