"""Finds the code of an old run, or restores it in a temporary folder.

The user's own files are never changed: a commit that is not checked out is put into a temporary git
worktree, and the patch of the run is applied there.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.failures.sentences import reading
from common.run_directory.code_tree import collect_tree
from common.run_directory.provenance import IMPORT_ROOT
from common.run_directory.records import ATTEMPTS, CONFIG, PROVENANCE, CodeTree
from common.storage.digests import sha256_of_file, shown_digest
from common.system.git import ask_git, git_environment, repository_of
from common.system.platforms.commands import quoted
from common.tools.reproduce.compared_run import NO_FOLDER, ComparedRun

CURRENT_CODE = "or add --current-code, which runs the code as it is now"
NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
LAST_CHARACTERS = 300  # the characters of git's message that an error repeats


@dataclass(frozen=True)
class RestoredCode:
    """Code that is ready to run."""

    recipe: Path  # the recipe's file
    library: Path  # the folder to import `common` from
    trees: list[CodeTree]  # the current state of each folder of code
    source: str  # where the code comes from, for a message


@contextmanager
def code_of_run(old: ComparedRun, uses_current_code: bool) -> Iterator[RestoredCode]:
    """Provide folders with the code of a run while the `with` block runs.

    Folders that had to be restored are removed afterwards.

    Args:
        uses_current_code: whether to use the files in their current state.

    Raises:
        UserError: the code is unknown, its commit is missing, its patch is damaged or does not fit,
            or it has no file of the recipe.
    """
    with ExitStack() as stack:
        folders: list[Path] = []
        sources: list[str] = []
        for tree in trees_of(old):
            if uses_current_code:
                folder = current_folder(tree, old)
                source = f"the current code in {folder}"
            else:
                folder, source = restore_tree(tree, old, stack)
            folders.append(folder)
            sources.append(source)
        # The first tree has the recipe. The last one has the library, unless the library was
        # installed as a package.
        recipe = folders[0] / recipe_of(old)
        if not recipe.is_file():
            raise missing_recipe_error(old, folders[0] if uses_current_code else None)
        library = folders[-1] if (folders[-1] / "common" / "run.py").is_file() else IMPORT_ROOT
        current_trees = [
            current_state(tree, folder) for tree, folder in zip(trees_of(old), folders, strict=True)
        ]
        yield RestoredCode(recipe, library, current_trees, "; ".join(dict.fromkeys(sources)))


def missing_recipe_error(old: ComparedRun, current_folder: Path | None) -> UserError:
    """Return the error for a run whose code lacks the recipe's file.

    Args:
        current_folder: the folder with the current code; None if the code that the run saved was
            searched. The saved code may lie in a temporary folder, so the error does not name it.
    """
    path = recipe_of(old)
    folder = trees_of(old)[0].folder
    if current_folder is not None:
        code = f"the current code in {current_folder}"
        remedy = f"put the file back as {current_folder / path}"
    else:
        code = "the code that the run saved"
        if folder == NO_FOLDER:  # a published run does not say where its code was
            place = f"{path} in the git clone that contains the run"
        else:
            place = str(Path(folder, path))
        remedy = f"put the file back as {place} and pass --current-code"
    return UserError(
        f"{old.directory} can't be reproduced, because its recipe, {path}, is not in {code}",
        advice=f"{remedy}, or reproduce another run",
    )


def trees_of(old: ComparedRun) -> list[CodeTree]:
    """Return the trees that a run saved.

    Raises:
        UserError: the run saved no code.
    """
    if not old.attempt.trees:
        raise unknown_code_error(old)
    return old.attempt.trees


def recipe_of(old: ComparedRun) -> str:
    """Return the path of the recipe's file in the first tree that a run saved.

    Raises:
        UserError: the run saved no code.
    """
    if old.attempt.recipe is None:
        raise unknown_code_error(old)
    return old.attempt.recipe


def unknown_code_error(old: ComparedRun) -> UserError:
    """Return the error for a run that saved no code, or whose record of it is lost."""
    reason = f"its {ATTEMPTS} is missing, damaged or names no code"
    first_step = ""
    if old.attempt.problem is not None:  # the recipe was typed into an interpreter
        reason = old.attempt.problem
        first_step = "save the recipe as a file, "
    return UserError(
        f"{old.directory} does not say which code it used, because {reason}",
        advice=(
            f"{first_step}train a new run with this recipe and --config "
            f"{quoted(old.directory / CONFIG)}, and reproduce the new run"
        ),
    )


def current_folder(tree: CodeTree, old: ComparedRun) -> Path:
    """Return the folder with the current state of a tree.

    A published run does not say where its code lies. For such a run, the result is the first of
    `folders_to_search` that has the tree's commit; if none has it, simply the first of them.

    Raises:
        UserError: the folder does not exist any more, or is unknown.
    """
    if tree.folder == NO_FOLDER:
        folders = folders_to_search(tree, old)
        for folder in folders:
            if tree.commit and has_commit(folder, tree.commit):
                return folder
        if folders:
            return folders[0]
        raise UserError(
            f"{old.directory} is a published run outside of any git repository, so its code can't "
            "be located",
            advice="move the folder into a git clone of the code's repository",
        )
    folder = Path(tree.folder)
    if not folder.is_dir():
        raise UserError(
            f"--current-code needs {folder}, the folder with the run's code, which does not exist",
            advice=(
                "put the code there, or leave out --current-code to run the code that the run saved"
            ),
        )
    return folder


def restore_tree(tree: CodeTree, old: ComparedRun, stack: ExitStack) -> tuple[Path, str]:
    """Return a folder with the code of a tree, and a text that says where it comes from.

    A folder that still has the saved state is used as it is. Otherwise the tree is restored in a
    temporary folder.

    Args:
        stack: removes the temporary folder, if one is needed, when the stack closes.

    Raises:
        UserError: the tree's commit is missing, or its patch is damaged or does not fit.
    """
    folders = folders_to_search(tree, old)
    for folder in folders:
        if folder.is_dir() and is_as_saved(tree, folder):
            return folder, f"{folder}, which is as it was"
    if tree.commit is None:
        folder = stack.enter_context(temporary_folder())
        apply_patch(tree, old, folder)
        return folder, "the files that the run saved"
    for repository in folders:
        if has_commit(repository, tree.commit):
            folder = stack.enter_context(worktree(repository, tree.commit))
            apply_patch(tree, old, folder)
            patch = " with the saved patch" if tree.patch is not None else ""
            return folder, f"commit {shown_digest(tree.commit)}{patch}, in a temporary worktree"
    raise missing_commit_error(tree, old, folders)


def missing_commit_error(tree: CodeTree, old: ComparedRun, folders: list[Path]) -> UserError:
    """Return the error for a commit that none of the searched folders has."""
    commit = f"commit {tree.commit} of {old.directory}"
    if shutil.which("git") is None:
        return UserError(
            f"{commit} can't be checked out, because there is no git on the PATH",
            advice="install git",
        )
    if not folders:
        return UserError(
            f"{commit} can't be found, because the run's folder is in no git repository",
            advice=(
                "move the run's folder into a git clone of its code, and run git fetch in this "
                "clone"
            ),
        )
    if not folders[0].is_dir():  # --current-code needs this folder, too
        return UserError(
            f"{commit} can't be found, because {folders[0]}, the folder with the run's code, does "
            "not exist",
            advice=f"put a git clone of its code at {quoted(folders[0])}",
        )
    problem = f"{commit} is not in {' or '.join(map(str, folders))}"
    repository = next((folder for folder in folders if repository_of(folder) is not None), None)
    if repository is None:
        advice = f"replace {quoted(folders[0])} by a git clone of the code, {CURRENT_CODE}"
        return UserError(problem, advice=advice)
    return UserError(problem, advice=f"run git fetch in {quoted(repository)}, {CURRENT_CODE}")


def folders_to_search(tree: CodeTree, old: ComparedRun) -> list[Path]:
    """Return folders that may have a tree's code.

    They are its own folder, this library's repository, and the repository that contains a published
    run. Repositories count only if the tree has a commit, which can be checked out there.
    """
    folders = [] if tree.folder == NO_FOLDER else [Path(tree.folder)]
    if tree.commit is not None:
        paths_in_repositories = [IMPORT_ROOT]
        if tree.folder == NO_FOLDER:
            paths_in_repositories.insert(0, old.directory)
        repositories = [repository_of(path) for path in paths_in_repositories]
        folders += [folder for folder in repositories if folder is not None]
    return [*dict.fromkeys(folders)]


def is_as_saved(tree: CodeTree, folder: Path) -> bool:
    """Whether a folder has the commit of a tree and the same changes."""
    current = current_state(tree, folder)
    return (
        current.commit == tree.commit
        and current.patch_sha256 == tree.patch_sha256
        and current.not_saved == tree.not_saved
    )


def current_state(saved: CodeTree, folder: Path) -> CodeTree:
    """Return the current code of a folder, to compare it with a saved tree.

    Files that git did not track in the saved tree are included.
    """
    return collect_tree(folder, [folder / name for name in saved.untracked]).tree


def has_commit(repository: Path, commit: str) -> bool:
    """Whether a folder exists and its git repository has the commit."""
    return (
        repository.is_dir()
        and ask_git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is not None
    )


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield an empty folder that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-reproduce-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def worktree(repository: Path, commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder; hooks of the repository do not run."""
    with temporary_folder() as parent:
        folder = parent / "code"
        run_git(repository, *NO_HOOKS, "worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            with contextlib.suppress(UserError):  # `temporary_folder` deletes the files anyway
                run_git(repository, "worktree", "remove", "--force", str(folder))


def apply_patch(tree: CodeTree, old: ComparedRun, folder: Path) -> None:
    """Apply the saved patch of a tree, if it has one.

    Args:
        folder: a folder with the tree's commit. Without a commit, the folder is empty, because the
            patch then adds whole files.

    Raises:
        UserError: the patch is missing or damaged, or does not fit.
    """
    if tree.patch is None:
        return
    path = old.directory / PROVENANCE / tree.patch
    with reading(str(path), f"restore the file from a backup, {CURRENT_CODE}"):
        digest = sha256_of_file(path)
    if digest != tree.patch_sha256:
        raise UserError(
            f"{path} has changed since the run wrote it",
            advice=f"restore the original file from a backup, {CURRENT_CODE}",
        )
    # Saved patches have no context lines (see `code_tree`), and may add spaces at the end of lines.
    run_git(folder, "apply", "--unidiff-zero", "--whitespace=nowarn", str(path))


def run_git(folder: Path, *arguments: str) -> None:
    """Run a git command in a folder.

    Raises:
        UserError: the command fails. The message ends with the end of git's own message.
    """
    command = ["git", "-C", str(folder), *arguments]
    # The folder may lie inside another repository, and git would apply a patch to that repository.
    # So git must not search the folders above it.
    environment = {**git_environment(), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        completed = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"git can't be run ({error.strerror})",
            advice="install git, or make it executable for your user",
        ) from None
    if completed.returncode:
        message = " ".join(completed.stderr.split())[-LAST_CHARACTERS:]
        raise UserError(
            f"git {arguments[0]} failed in {folder} ({message})",
            advice=f"remove the cause that git names, {CURRENT_CODE}",
        )
