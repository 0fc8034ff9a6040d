"""The code of an old run: taken where it is as it was, otherwise restored in another folder."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.run_directory.provenance import current_attempt
from common.run_directory.records import PROVENANCE
from common.tools.reproduce import code as code_module
from common.tools.reproduce.code import code_of_run
from common.tools.reproduce.compared_run import NO_FOLDER, ComparedRun
from tests.git_repository import commit_all, git
from tests.unit.saved_config import saved_config
from tests.unit.tools.reproduce.made_up_runs import write_run

pytestmark = pytest.mark.usefixtures("hidden_test_files")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe with an uncommitted change, in a repository."""
    path = tmp_path / "code" / "recipes" / "tiny.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    commit_all(path.parents[1])
    path.write_text("x = 2\n")
    return path


def run_of(recipe: Path, folder: Path) -> ComparedRun:
    """Return a run that a recipe has made now."""
    attempt, trees = current_attempt(recipe, 0, saved_config().environment, {})
    old = write_run(folder, attempt=attempt.to_json())
    for collected in trees:
        if collected.tree.patch is not None:
            (folder / PROVENANCE / collected.tree.patch).write_bytes(collected.patch)
    return old


def test_unchanged_code_is_used_where_it_is(recipe: Path, tmp_path: Path) -> None:
    """Nothing is copied."""
    with code_of_run(run_of(recipe, tmp_path / "run"), False) as code:
        assert code.recipe == recipe


@pytest.mark.parametrize("change", ["edit", "commit", "undo"])
def test_changed_code_is_restored_elsewhere(recipe: Path, tmp_path: Path, change: str) -> None:
    """The user's files stay as they are, and the temporary folder is gone afterwards."""
    old = run_of(recipe, tmp_path / "run")
    root = recipe.parents[1]
    recipe.write_text("x = 1\n" if change == "undo" else "x = 3\n")
    if change == "commit":
        git(root, "commit", "--quiet", "--all", "--message", "later")
    state = (git(root, "rev-parse", "HEAD"), git(root, "diff"), recipe.read_text())
    with code_of_run(old, False) as code:
        assert code.recipe.read_text() == "x = 2\n"
        assert code.trees[0].patch_sha256 == old.attempt.trees[0].patch_sha256
        restored = code.recipe
    assert not restored.exists()
    assert git(root, "worktree", "list").count("\n") == 0
    assert (git(root, "rev-parse", "HEAD"), git(root, "diff"), recipe.read_text()) == state
    with code_of_run(old, True) as code:
        assert code.recipe == recipe


def test_recipe_without_a_repository_is_restored(tmp_path: Path) -> None:
    """From the files that the run saved, even if its folder is gone."""
    recipe = tmp_path / "code" / "tiny.py"
    recipe.parent.mkdir()
    recipe.write_text("x = 1\n")
    old = run_of(recipe, tmp_path / "run")
    with code_of_run(old, False) as code:
        assert code.recipe == recipe
    recipe.unlink()
    recipe.parent.rmdir()
    with code_of_run(old, False) as code:
        assert code.recipe.read_text() == "x = 1\n"
    with (
        pytest.raises(
            UserError, match="does not exist: put the code there, or leave out --current-code"
        ),
        code_of_run(old, True),
    ):
        pass


def test_missing_or_damaged_parts_are_named(recipe: Path, tmp_path: Path) -> None:
    """The message says what to do."""
    old = run_of(recipe, tmp_path / "run")
    (tree, *_) = old.attempt.trees
    recipe.write_text("x = 3\n")
    assert tree.patch is not None
    patch = old.directory / PROVENANCE / tree.patch
    contents = patch.read_bytes()
    patch.write_bytes(contents + b"\n")
    with (
        pytest.raises(UserError, match="has changed since the run wrote it"),
        code_of_run(old, False),
    ):
        pass
    patch.unlink()
    with pytest.raises(UserError, match="can't be read"), code_of_run(old, False):
        pass
    patch.write_bytes(contents)
    lost = tree.model_copy(update={"commit": "ab" * 20})
    with ExitStack() as stack, pytest.raises(UserError, match="git fetch"):
        code_module.restore_tree(lost, old, stack)
    gone = lost.model_copy(update={"folder": str(old.directory / "gone")})
    advice = f"put a git clone of its code at {old.directory / 'gone'}$"
    with ExitStack() as stack, pytest.raises(UserError, match=f"does not exist: {advice}"):
        code_module.restore_tree(gone, old, stack)
    outside = code_module.missing_commit_error(lost, old, [])
    assert outside.advice.endswith("run git fetch in this clone")


def test_missing_recipe_is_named_with_its_place(recipe: Path, tmp_path: Path) -> None:
    """The current code lacks it, or the run saved code without it, or the run is published."""
    old = run_of(recipe, tmp_path / "run")
    recipe.unlink()
    expected = f"recipes/tiny.py, is not in the current code in {recipe.parents[1]}"
    with pytest.raises(UserError, match=re.escape(expected)), code_of_run(old, True):
        pass
    saved = code_module.missing_recipe_error(old, None)
    assert "its recipe, recipes/tiny.py, is not in the code that the run saved" in saved.problem
    assert f"put the file back as {recipe} and pass --current-code" in saved.advice
    tree = old.attempt.trees[0].model_copy(update={"folder": NO_FOLDER})
    published = with_attempt(old, trees=[tree])
    advice = code_module.missing_recipe_error(published, None).advice
    assert "recipes/tiny.py in the git clone that contains the run and pass" in advice


@pytest.mark.parametrize(
    ("attempts", "reason", "first_step"),
    [
        ([], "its provenance/attempts.json is missing, damaged or names no code", ""),
        (
            [{"trees": [], "recipe": None, "problem": "the recipe is in no file"}],
            "the recipe is in no file",
            "save the recipe as a file, ",
        ),
        (
            [{"recipe": None}],
            "its provenance/attempts.json is missing, damaged or names no code",
            "",
        ),
    ],
)
@pytest.mark.parametrize("uses_current_code", [False, True])
def test_run_that_saved_no_code_is_refused(
    recipe: Path,
    tmp_path: Path,
    attempts: list[dict[str, object]],
    reason: str,
    first_step: str,
    uses_current_code: bool,
) -> None:
    """The disk may have been full when the run began, or its record was damaged later."""
    old = run_of(recipe, tmp_path / "run")
    changed = [old.attempt.model_copy(update=changes) for changes in attempts]
    without_code = replace(old, attempts=changed)
    with (
        pytest.raises(
            UserError,
            match=f"which code it used, because {reason}: {first_step}train a new run",
        ),
        code_of_run(without_code, uses_current_code),
    ):
        pass


def with_attempt(old: ComparedRun, **changes: object) -> ComparedRun:
    """Return a run whose only attempt has other entries."""
    return replace(old, attempts=[old.attempt.model_copy(update=changes)])


def test_hooks_of_the_repository_do_not_run(recipe: Path, tmp_path: Path) -> None:
    """`git worktree add` would run the hook for a check-out."""
    old = run_of(recipe, tmp_path / "run")
    recipe.write_text("x = 3\n")
    hook = recipe.parents[1] / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    hook.chmod(0o755)
    with code_of_run(old, False):
        assert not (tmp_path / "ran").exists()
