"""Finds the code of a past run, or restores it in a temporary folder.

The user's own files are never changed: a commit that is not checked out is put into a temporary git
worktree, and the patch of the run is applied there.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.digests import sha256_of_file
from common.errors import UserError
from common.run_directory.code_tree import (
    CollectedTree,
    ask_git,
    collect_tree,
    git_environment,
    repository_of,
)
from common.run_directory.provenance import LIBRARY
from common.run_directory.recipe_source import FIRST_SOURCE
from common.run_directory.records import CONFIG, PROVENANCE, CodeTree
from common.system.platforms import quoted
from common.tools.reproduce.past_run import NO_FOLDER, PastRun

PRESENT_CODE = "or add --present-code, which runs the code as it is now"
NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
LAST_CHARACTERS = 300  # of git's message, in a sentence


@dataclass(frozen=True)
class PlacedCode:
    """Code that is ready to run."""

    recipe: Path
    library: Path  # the folder to import `common` from
    trees: list[CodeTree]  # as they are there now
    source: str  # where the code comes from, in words


@contextmanager
def code_of(past: PastRun, uses_present_code: bool) -> Iterator[PlacedCode]:
    """Provide the code of a run while the `with` block runs.

    Args:
        uses_present_code: whether to take the files as they are now.

    Raises:
        UserError: the code is unknown, its commit is missing, or its patch does not fit.
    """
    with ExitStack() as stack:
        folders: list[Path] = []
        words: list[str] = []
        for tree in trees_of(past):
            if uses_present_code:
                folder = present_folder(tree, past)
                source = f"the present code in {folder}"
            else:
                folder, source = place(tree, past, stack)
            folders.append(folder)
            words.append(source)
        recipe = recipe_in(folders[0], past, stack)
        if recipe is None:
            advice = "put its file back, or reproduce another run"
            raise UserError(
                f"the recipe {past.config.recipe}.py of {past.directory} is not in {folders[0]}",
                advice=advice,
            )
        library = folders[-1] if (folders[-1] / "common" / "run.py").is_file() else LIBRARY
        present = [
            collected_as(tree, folder).tree
            for tree, folder in zip(trees_of(past), folders, strict=True)
        ]
        yield PlacedCode(recipe, library, present, "; ".join(dict.fromkeys(words)))


def trees_of(past: PastRun) -> list[CodeTree]:
    """Return the trees that a run saved; of an older run, its commit alone.

    Raises:
        UserError: nothing is known about the run's code.
    """
    if past.attempt.trees:
        return past.attempt.trees
    commit = past.config.environment.git_commit
    repository = repository_of(LIBRARY)
    if past.attempt.problem is not None or commit is None or repository is None:
        raise UserError(
            f"{past.directory} does not say which code it used",
            advice=(
                "in a git clone, train a new run with the same recipe and --config "
                f"{quoted(past.directory / CONFIG)}, and reproduce the new run"
            ),
        )
    return [CodeTree(folder=str(repository), commit=commit)]


def present_folder(tree: CodeTree, past: PastRun) -> Path:
    """Return the folder with the present state of a tree.

    Raises:
        UserError: the folder is gone.
    """
    if tree.folder == NO_FOLDER:
        folders = candidates(tree, past)
        with_commit = [path for path in folders if tree.commit and has_commit(path, tree.commit)]
        if with_commit or folders:
            return [*with_commit, *folders][0]
        raise UserError(
            f"{past.directory} is a published run outside of any git repository, so its code can't "
            "be located",
            advice="move the folder into a git clone of the code's repository",
        )
    folder = Path(tree.folder)
    if not folder.is_dir():
        raise UserError(
            f"--present-code needs {folder}, the folder with the run's code, which does not exist",
            advice=(
                "put the code there, or leave out --present-code to run the code that the run saved"
            ),
        )
    return folder


def place(tree: CodeTree, past: PastRun, stack: ExitStack) -> tuple[Path, str]:
    """Return a folder with the code of a tree, and in words where it comes from.

    Args:
        stack: removes a temporary folder at its end.
    """
    folders = candidates(tree, past)
    for folder in folders:
        if folder.is_dir() and is_as_saved(tree, folder):
            return folder, f"{folder}, which is as it was"
    if tree.commit is None:
        folder = stack.enter_context(temporary_folder())
        apply_patch(tree, past, folder)
        return folder, "the files that the run saved"
    for repository in folders:
        if has_commit(repository, tree.commit):
            folder = stack.enter_context(worktree(repository, tree.commit))
            apply_patch(tree, past, folder)
            patch = " with the saved patch" if tree.patch is not None else ""
            return folder, f"commit {tree.commit[:7]}{patch}, in a temporary worktree"
    places = " or ".join(map(str, folders)) or "any git repository around the run's folder"
    raise UserError(
        f"commit {tree.commit} of {past.directory} is not in {places}",
        advice=f"get the commit with git fetch in a clone that contains the run, {PRESENT_CODE}",
    )


def candidates(tree: CodeTree, past: PastRun) -> list[Path]:
    """Return folders that may have a tree's code.

    They are its own folder, this library's repository, and the repository that a published run
    lies in. A repository can serve only if the tree has a commit, which can be checked out there.
    """
    folders = [] if tree.folder == NO_FOLDER else [Path(tree.folder)]
    if tree.commit is not None:
        near = [LIBRARY]
        if tree.folder == NO_FOLDER:
            near.insert(0, past.directory)
        repositories = [repository_of(folder) for folder in near]
        folders += [folder for folder in repositories if folder is not None]
    return [*dict.fromkeys(folders)]


def is_as_saved(tree: CodeTree, folder: Path) -> bool:
    """Whether a folder has the commit of a tree and the same changes."""
    present = collected_as(tree, folder).tree
    return (
        present.commit == tree.commit
        and present.patch_sha256 == tree.patch_sha256
        and present.not_saved == tree.not_saved
    )


def collected_as(tree: CodeTree, folder: Path) -> CollectedTree:
    """Return the state of a folder, with the untracked files that a saved tree has."""
    return collect_tree(folder, [folder / name for name in tree.untracked])


def has_commit(repository: Path, commit: str) -> bool:
    """Whether a folder is in a repository that has a commit."""
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
            with contextlib.suppress(UserError):
                run_git(repository, "worktree", "remove", "--force", str(folder))


def apply_patch(tree: CodeTree, past: PastRun, folder: Path) -> None:
    """Apply the saved patch of a tree to a folder with its commit.

    Raises:
        UserError: the patch is missing or damaged, or does not fit.
    """
    if tree.patch is None:
        return
    path = past.directory / PROVENANCE / tree.patch
    try:
        digest = sha256_of_file(path)
    except OSError as error:
        raise UserError(
            f"{path} can't be read ({error.strerror})",
            advice=f"restore the file from a backup, {PRESENT_CODE}",
        ) from None
    if digest != tree.patch_sha256:
        raise UserError(
            f"{path} has changed since the run wrote it",
            advice=f"restore the original file from a backup, {PRESENT_CODE}",
        )
    run_git(folder, "apply", "--unidiff-zero", "--whitespace=nowarn", str(path))


def run_git(folder: Path, *words: str) -> None:
    """Run a git command in a folder.

    Raises:
        UserError: it fails. The message has the end of git's own.
    """
    command = ["git", "-C", str(folder), *words]
    # A temporary folder may lie in a repository, to which git would apply a patch.
    environment = {**git_environment(), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    except OSError as error:
        raise UserError(f"git can't be run ({error.strerror})", advice="install git") from None
    if answer.returncode:
        message = " ".join(answer.stderr.split())[-LAST_CHARACTERS:]
        raise UserError(
            f"git {words[0]} failed in {folder} ({message})",
            advice=f"remove the cause that git names, {PRESENT_CODE}",
        )


def recipe_in(folder: Path, past: PastRun, stack: ExitStack) -> Path | None:
    """Return the recipe's file in a folder of code; None if it is not there.

    An older run did not save its path. It is found by its name and digest. If no file has that
    digest, the text that the run kept is used.
    """
    if past.attempt.recipe is not None:
        path = folder / past.attempt.recipe
        return path if path.is_file() else None
    name = f"{past.config.recipe}.py"
    listing = ask_git(folder, "ls-files", "-z", "--", f"*{name}") or b""
    paths = [folder / word for word in listing.decode("utf-8", "surrogateescape").split("\0")]
    named = [path for path in paths if path.name == name and path.is_file()]
    with_same_text = [path for path in named if sha256_of_file(path) == past.config.source.sha256]
    if with_same_text:
        return with_same_text[0]
    if (past.directory / FIRST_SOURCE).is_file():
        copy = stack.enter_context(temporary_folder()) / name
        shutil.copy(past.directory / FIRST_SOURCE, copy)
        return copy
    return first_of(named)


def first_of(paths: Sequence[Path]) -> Path | None:
    return paths[0] if paths else None
