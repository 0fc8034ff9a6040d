"""The GitHub workflow: pinned actions, few permissions, and the same tests on each system."""

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
# A command that bash and PowerShell read alike: one line of plain words.
PORTABLE = re.compile(r"python( -m)?( [\w./=-]+)+")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    """Return the parsed workflow."""
    path = REPOSITORY / ".github" / "workflows" / "ci.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_linter_has_no_complaint(path: Path) -> None:
    """The linter checks the syntax and finds ways for others into the repository."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None and "CI" not in os.environ:
        pytest.skip("pip install -r requirements-dev.txt brings the linter")
    assert zizmor is not None
    words = [zizmor, "--offline", "--persona", "pedantic", "--no-progress", str(path)]
    answer = subprocess.run(words, capture_output=True, encoding="utf-8")
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path: Path) -> None:
    """Each action is pinned by the full digest of a commit, with its version."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert PINNED.search(line), line


def test_permissions_are_few(workflow: dict[str, Any]) -> None:
    """Nothing may be written, and commands get no credentials."""
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        checkout = job["steps"][0]
        assert checkout["uses"].startswith("actions/checkout@")
        assert checkout["with"] == {"persist-credentials": False}


def test_every_system_runs_the_oldest_and_newest_python(workflow: dict[str, Any]) -> None:
    """`pyproject.toml` states both."""
    matrix = workflow["jobs"]["systems"]["strategy"]["matrix"]
    systems = {name.partition("-")[0] for name in matrix["system"]}
    assert systems == {"ubuntu", "macos", "windows"}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = matrix["python"]
    assert project["requires-python"] == f">={oldest}"
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if name[-1].isdigit()]
    assert [oldest, newest] == [named[0], named[-1]]


def test_commands_run_in_every_shell(workflow: dict[str, Any]) -> None:
    """Windows has PowerShell and no bash. Each file that a command names exists."""
    commands = [step["run"] for step in workflow["jobs"]["systems"]["steps"] if "run" in step]
    assert commands[-1] == "python -m pytest"
    for command in commands:
        assert PORTABLE.fullmatch(command), command
        for word in command.split():
            if "/" in word or word.endswith(".txt"):
                assert (REPOSITORY / word).is_file(), word


def test_macos_runs_on_the_cpu(workflow: dict[str, Any]) -> None:
    """GitHub's macOS machines have a GPU on which each allocation fails."""
    assert workflow["jobs"]["systems"]["env"]["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_launches_hide_the_accelerators_of_each_system(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests run on CPUs. No variable hides Apple's GPU, so a flag does."""
    monkeypatch.setattr(sys, "platform", system)
    environment = clean_environment(Path())
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    is_asked_for = environment.get("ACCELERATE_USE_CPU") == "true"
    assert is_asked_for == (system == "darwin")
    assert ("--cpu" in launch_command("accelerate")) == (system == "darwin")
