"""The workflow of GitHub: pinned, with few permissions, and the same tests on each system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import REPOSITORY, clean_environment, launch_command

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
# What bash and PowerShell read alike: one line, of plain words.
PORTABLE = re.compile(r"python( -m)?( [\w./=-]+)+")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    """The parsed workflow."""
    path = REPOSITORY / ".github" / "workflows" / "ci.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_linter_has_no_complaint(path: Path) -> None:
    """It looks for mistakes in the syntax, and for what lets others into the repository."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None and "CI" not in os.environ:
        pytest.skip("pip install -r requirements-dev.txt brings the linter")
    assert zizmor is not None
    words = [zizmor, "--offline", "--persona", "pedantic", "--no-progress", str(path)]
    answer = subprocess.run(words, capture_output=True, encoding="utf-8")
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path: Path) -> None:
    """By the whole digest of a commit, with the version that it is of."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert PINNED.search(line), line


def test_permissions_are_few(workflow: dict[str, Any]) -> None:
    """Nothing may be written, and no key is left to the commands."""
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        checkout = job["steps"][0]
        assert checkout["uses"].startswith("actions/checkout@")
        assert checkout["with"] == {"persist-credentials": False}


def test_each_system_and_both_ends_of_python(workflow: dict[str, Any]) -> None:
    """The oldest Python is the one that the project asks for, the newest the one that it names."""
    matrix = workflow["jobs"]["systems"]["strategy"]["matrix"]
    systems = {name.partition("-")[0] for name in matrix["system"]}
    assert systems == {"ubuntu", "macos", "windows"}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = matrix["python"]
    assert project["requires-python"] == f">={oldest}"
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if name[-1].isdigit()]
    assert [oldest, newest] == [named[0], named[-1]]


def test_commands_run_in_every_shell(workflow: dict[str, Any]) -> None:
    """Windows has PowerShell and no bash script; and each file that they name is there."""
    commands = [step["run"] for step in workflow["jobs"]["systems"]["steps"] if "run" in step]
    assert commands[-1] == "python -m pytest"
    for command in commands:
        assert PORTABLE.fullmatch(command), command
        for word in command.split():
            if "/" in word or word.endswith(".txt"):
                assert (REPOSITORY / word).is_file(), word


def test_no_system_trains_on_a_gpu_that_has_no_memory(workflow: dict[str, Any]) -> None:
    """GitHub's macOS machines show Apple's GPU, and each allocation on it fails."""
    assert workflow["jobs"]["systems"]["env"]["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_launches_hide_the_accelerators_of_each_system(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests are about CPUs. Apple's GPU has no variable that hides it."""
    monkeypatch.setattr(sys, "platform", system)
    environment = clean_environment(Path())
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    is_asked_for = environment.get("ACCELERATE_USE_CPU") == "true"
    assert is_asked_for == (system == "darwin")
    assert ("--cpu" in launch_command("accelerate")) == (system == "darwin")
