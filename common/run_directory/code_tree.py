"""Collects the code of a run: its git commit, and a patch with the differences from that commit.

`recipes reproduce` restores this code, to repeat the run.
``git apply --unidiff-zero`` applies a patch. Secrets are kept out of it: *** replaces text that
looks like a secret in an added line, and files with names such as ``.env`` are left out.
"""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.run_directory.patches import (
    file_of_patch,
    patch_of_new_file,
    reason_to_leave_out,
    split_patch,
    with_masked_secrets,
)
from common.run_directory.records import CodeTree
from common.storage.digests import sha256_of_bytes
from common.system.git import ask_git, commit_of, repository_of
from common.system.installed_code import is_in_standard_library, is_installed

MAX_BYTES = 4 * 2**20  # the largest patch
MAX_FILES = 1000  # changed files; with more of them, git's command line would be too long
DIFF = (
    "diff",
    "HEAD",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    # Without context lines, the patch does not repeat an unchanged line that has a secret.
    "--unified=0",
    "--full-index",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--ignore-submodules=all",
)


@dataclass(frozen=True)
class CollectedTree:
    """A folder of code, with the contents of its patch."""

    tree: CodeTree
    patch: bytes


def trees_of_process(recipe_file: Path, library: Path) -> list[CollectedTree]:
    """Return the code that this process uses: the trees of the recipe and of this library.

    The recipe's tree is its repository, or its folder if it is in none. The library has no separate
    tree if it is in the same repository or in none.

    Args:
        library: the folder that this library is imported from.
    """
    recipe = recipe_file.resolve()
    recipe_root = repository_of(recipe.parent) or recipe.parent
    library_root = repository_of(library)
    roots = [recipe_root]
    if library_root not in (None, recipe_root):
        roots.append(library_root)
    modules = imported_files()
    trees = []
    for root in roots:
        # One repository may lie inside the other. Its files then belong to it alone.
        inner = [other for other in roots if other != root and other.is_relative_to(root)]
        used = {path for path in modules if is_below(path, root, inner)}
        if root == recipe_root:
            used.add(recipe)
        trees.append(collect_tree(root, used))
    return trees


def imported_files() -> set[Path]:
    """Return the Python files that this process has imported, as real paths.

    Files of Python and of installed packages are left out. Files of `common` are included, unlike
    in `common.command_line.flag_uses`, because they are needed to repeat a run.
    """
    # The folders of code, which these files are compared with, are real, too.
    return {Path(name).resolve() for name in imported_file_names()}


def imported_file_names() -> set[str]:
    """Return the files of `imported_files` as modules name them.

    This compares texts: making a path of each of thousands of modules would take 50 ms.
    """
    names = set()
    environment = os.path.join(sys.prefix, "")
    for module in list(sys.modules.values()):  # another thread may import at the same time
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py") or not os.path.isabs(name):
            continue
        is_of_python = is_in_standard_library(name) or name.startswith(environment)
        if not is_of_python and not is_installed(name):
            names.add(name)
    return names


def is_below(path: Path, root: Path, inner: Iterable[Path]) -> bool:
    """Whether a file lies in the folder `root`, but in none of the `inner` folders."""
    return path.is_relative_to(root) and not any(path.is_relative_to(other) for other in inner)


def collect_tree(root: Path, used: Collection[Path]) -> CollectedTree:
    """Return a folder of code with a patch of its differences from the commit that is checked out.

    Without a commit, the patch adds all files in `used`. A patch that would be larger than
    `MAX_BYTES` is left out.

    Args:
        root: the top folder of a repository, or a folder that is in none.
        used: the files in this folder that a run uses. Files that git does not track are saved only
            if they are among these.
    """
    commit = commit_of(root) if repository_of(root) == root else None
    names = sorted(path.relative_to(root).as_posix() for path in used)
    parts: list[str] = []  # of the patch, one for each file
    not_saved: list[str] = []
    untracked = names  # without a commit, git tracks none of them
    if commit is not None:
        changes, not_saved = changes_of(root)
        parts += changes
        listed = untracked_of(root, names)
        if listed is None:
            not_saved.append("files that git does not track, because git can't list them")
        untracked = listed or []
    saved_untracked = []
    for name in untracked:
        part, problem = patch_of_new_file(root, name)
        if problem is not None:
            not_saved.append(f"{name}: {problem}")
        if part is not None:
            parts.append(part)
            saved_untracked.append(name)
    patch = "".join(parts).encode("utf-8", "surrogateescape")
    if len(patch) > MAX_BYTES:
        not_saved.append(f"all changes, because they are {len(patch):,} bytes as a patch")
        patch = b""
        saved_untracked = []
    digest = sha256_of_bytes(patch) if patch else None
    tree = CodeTree(
        folder=str(root),
        commit=commit,
        patch=None if digest is None else f"code-{digest[:12]}.patch",
        patch_sha256=digest,
        untracked=saved_untracked,
        not_saved=not_saved,
    )
    return CollectedTree(tree, patch)


def changes_of(root: Path) -> tuple[list[str], list[str]]:
    """Return the patch of each changed file, and the files that have none, each with the reason.

    The second list also has the files whose patches have masked secrets.
    """
    listing = ask_git(root, *DIFF, "--name-only", "-z")
    if listing is None:
        return [], ["all changes, because git can't list them"]
    names = [name for name in listing.decode("utf-8", "surrogateescape").split("\0") if name]
    if len(names) > MAX_FILES:
        return [], [f"all changes, because {len(names):,} files differ from the commit"]
    reasons = {name: reason_to_leave_out(root / name) for name in names}
    not_saved = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    saved_paths = [f":(top,literal){name}" for name, reason in reasons.items() if reason is None]
    if not saved_paths:
        return [], not_saved
    output = ask_git(root, *DIFF, "--", *saved_paths, most_bytes=MAX_BYTES)
    if output is None:
        not_saved.append(f"all changes, because git can't show them in {MAX_BYTES:,} bytes")
        return [], not_saved
    parts = []
    for part in split_patch(output.decode("utf-8", "surrogateescape")):
        masked_part, problem = with_masked_secrets(part)
        if problem is not None:
            not_saved.append(f"{file_of_patch(part)}: {problem}")
        if masked_part is not None:
            parts.append(masked_part)
    return parts, not_saved


def untracked_of(root: Path, names: Sequence[str]) -> list[str] | None:
    """Return those of the files `names` that git does not track; None if git fails.

    Ignored files are included. `git diff` does not show any of these files, so each needs a patch
    of its own.
    """
    if not names:
        return []
    paths = [f":(top,literal){name}" for name in names]
    output = ask_git(root, "ls-files", "-z", "--", *paths)
    if output is None:
        return None
    tracked = {*output.decode("utf-8", "surrogateescape").split("\0")}
    return [name for name in names if name not in tracked]
