"""What a run saves to be trained again: attempts, packages, and nothing that could stop it."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path

import pytest

from common.run_directory import provenance
from common.run_directory.provenance import (
    ProvenanceWriter,
    installed_packages,
    saved_attempts,
    with_attempt,
)
from common.run_directory.records import ATTEMPTS, PROVENANCE, Attempt
from tests.unit.saved_config import saved_config

ENVIRONMENT = saved_config().environment


def attempt(step: int, **facts: object) -> Attempt:
    """Return an attempt from an update on, with `cores` 2 unless stated."""
    return Attempt.model_validate({"global_step": step, "cores": 2, **facts})


def test_only_changes_are_added() -> None:
    """A resume with the same code and machine adds nothing. One from before a change removes it."""
    first = attempt(0)
    assert with_attempt([], first) == [first]
    assert with_attempt([first], attempt(5)) == [first]
    changed = attempt(5, cores=4)
    assert with_attempt([first], changed) == [first, changed]
    assert with_attempt([first, changed], attempt(9, cores=4)) == [first, changed]
    assert with_attempt([first, changed], attempt(3)) == [first]
    assert with_attempt([first, changed], attempt(0, cores=8)) == [attempt(0, cores=8)]


def test_other_processes_threads_or_flags_are_changes() -> None:
    """A later attempt with the same processes, threads and flags is no change."""
    first = attempt(0, world_size=2, threads_per_process=1, mixed_precision="no")
    for change in ({"world_size": 1}, {"threads_per_process": 2}, {"mixed_precision": "bf16"}):
        changed = first.model_copy(update={"global_step": 5, **change})
        assert with_attempt([first], changed) == [first, changed]
    flags = first.model_copy(update={"global_step": 5, "changed_flags": {"num_workers": 3}})
    assert with_attempt([first], flags) == [first, flags]
    later = first.model_copy(update={"global_step": 9, "changed_flags": {}})
    assert with_attempt([first, flags], later) == [first, flags]


@pytest.mark.usefixtures("hidden_test_files")
def test_attempt_says_which_code_and_packages_it_uses(tmp_path: Path) -> None:
    """A recipe that is in no repository is saved with its text. The library has a commit."""
    recipe = tmp_path / "code" / "train.py"
    recipe.parent.mkdir()
    recipe.write_text("x = 1\n")
    directory = tmp_path / "run"
    directory.mkdir()
    writer = ProvenanceWriter(directory, recipe)
    writer.begin(0, ENVIRONMENT, {})
    writer.wait()
    (saved,) = saved_attempts(directory)
    assert saved.recipe == "train.py"
    own, library = saved.trees
    assert (own.folder, own.untracked) == (str(recipe.parent), ["train.py"])
    assert own.patch is not None
    assert "+x = 1\n" in (directory / PROVENANCE / own.patch).read_text()
    assert Path(library.folder).samefile(provenance.IMPORT_ROOT)
    assert library.commit is not None
    assert saved.packages["torch"] == metadata.version("torch")
    assert saved.cores
    assert (saved.world_size, saved.mixed_precision) == (1, "no")
    writer.begin(4, ENVIRONMENT, {})  # a resume
    writer.wait()
    assert saved_attempts(directory) == [saved]


def test_imported_packages_are_those_of_the_recipe_and_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the names of their packages, also where they are imported in a function."""
    recipe = tmp_path / "train.py"
    recipe.write_text("import os\nimport numpy.linalg\nimport beside_it\nfrom . import nothing\n")
    beside = tmp_path / "beside_it.py"
    beside.write_text("def f():\n    from PIL import Image\n    import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "beside_it", importlib.import_module("beside_it"))
    importlib.import_module("PIL")
    names = {*installed_packages()}
    files = {beside}
    monkeypatch.setattr(provenance, "imported_files", lambda: files)
    assert provenance.imported_packages(recipe, names) == ["numpy", "pillow"]
    recipe.write_text("import (")
    assert provenance.imported_packages(recipe, names) == ["pillow"]


def test_packages_are_those_of_importlib() -> None:
    """The names of folders say the same as the files in them."""
    expected = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        expected.setdefault(name, distribution.version)
    packages = installed_packages()
    assert packages.keys() == expected.keys()
    differing = {name for name, version in packages.items() if version != expected[name]}
    assert differing == set()


def test_only_named_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other may be a secret."""
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("WANDB_API_KEY", "feedface")
    assert provenance.machine_facts().variables["MKL_CBWR"] == "AVX2"
    assert "feedface" not in str(provenance.machine_facts())


@pytest.mark.usefixtures("hidden_test_files")
def test_failure_to_write_stops_no_run(tmp_path: Path) -> None:
    """A file is in the way of the folder, as if the disk refused it."""
    (tmp_path / PROVENANCE).write_text("")
    writer = ProvenanceWriter(tmp_path, Path(__file__))
    writer.write(0, ENVIRONMENT, {})
    assert saved_attempts(tmp_path) == []


@pytest.mark.usefixtures("hidden_test_files")
def test_recipe_without_a_file_is_no_mistake(tmp_path: Path) -> None:
    """A recipe that was typed into an interpreter has no file, and is accepted."""
    ProvenanceWriter(tmp_path, tmp_path / "<stdin>").write(0, ENVIRONMENT, {})
    assert (tmp_path / ATTEMPTS).exists()
    (saved,) = saved_attempts(tmp_path)
    assert (saved.recipe, saved.problem) == (None, "the recipe is in no file")
