"""The list of packages to bring to a machine without a network."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import bring
from benchmarks.harness.bare_environment import entries_of_missing, installed_versions


def names(wheels: list[bring.Wheel], *, needed: bool = True) -> set[str]:
    return {wheel.name for wheel in wheels if wheel.is_needed is needed}


def test_list_for_a_known_machine() -> None:
    """The machine has torch and transformers, but lacks tyro, datasets and their requirements."""
    installed = bring.read_installed(bring.Options().installed)
    wheels = bring.missing_wheels(bring.project_requirements(), installed, "3.12")
    assert {"tyro", "pydantic", "datasets", "dill", "multiprocess"} <= names(wheels)
    assert {"wandb", "optuna"} <= names(wheels, needed=False)
    assert not installed.keys() & names(wheels)
    lines = [str(wheel) for wheel in wheels]
    assert f"datasets=={metadata.version('datasets')}" in lines
    assert f"# wandb=={metadata.version('wandb')}" in lines


def test_list_is_complete() -> None:
    """Every requirement of a listed package is listed or installed there."""
    installed = bring.read_installed(bring.Options().installed)
    wheels = bring.missing_wheels(bring.project_requirements(), installed, "3.12")
    listed = {wheel.name for wheel in wheels}
    for name in listed:
        for requirement in bring.requirements_of(name, (), "3.12"):
            assert canonicalize_name(requirement.name) in listed | installed.keys(), name


def test_complete_machine_lacks_nothing() -> None:
    """The list for such a machine is empty."""
    installed = dict(installed_versions())
    assert bring.missing_wheels(bring.project_requirements(), installed, "3.12") == []


@pytest.mark.parametrize(
    ("line", "is_missing"),
    [("tyro==0.1", True), ("tyro==1.0.0", False), ("tyro", False), ("# tyro==1.0.0", True)],
)
def test_installed_version_has_to_fit(line: str, is_missing: bool, tmp_path: Path) -> None:
    """A package with another version, or only in a comment of the list, counts as missing."""
    file = tmp_path / "installed.txt"
    file.write_text(f"{line}\ntyping_extensions==4.15.0\n")
    installed = bring.read_installed(file)
    missing = bring.missing_of(Requirement("tyro>=1,<2"), installed, "3.12")
    assert ("tyro" in missing) == is_missing
    assert "typing-extensions" not in missing


def test_check_hides_missing_packages() -> None:
    """`--check` hides neither listed packages nor what this environment's own versions require."""
    installed = {"torch": None, "huggingface-hub": "1.0"}
    wheels = [bring.Wheel("tyro", "1", True), bring.Wheel("wandb", "1", False)]
    hidden = bring.left_out(installed, wheels, "3.12")
    assert {"wandb", "optuna", "datasets"} <= hidden
    assert not {"tyro", "torch", "sympy", "huggingface-hub", "tqdm"} & hidden


def test_shared_folders_stay() -> None:
    """A folder of a missing package is hidden unless other packages use it, too."""
    hidden = entries_of_missing({"wandb", "datasets"})
    assert {"wandb", "datasets"} <= hidden
    assert not {"torch", "numpy", "common"} & hidden
