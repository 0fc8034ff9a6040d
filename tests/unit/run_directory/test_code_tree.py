"""The code of a run: a commit and a patch restore it, and the patch has no secrets."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from common.run_directory import code_tree
from common.run_directory.code_tree import CollectedTree, collect_tree
from common.system.git import ask_git, commit_of, repository_of
from tests.git_repository import commit_all, git
from tests.launch import REPOSITORY

# Contents before and after; None: there is no such file.
EDITS: dict[str, tuple[str | None, str | None]] = {
    "lines.py": ("a\nb\nc\nd\n", "a\nB\nc\nd\ne\n"),
    "without end.py": ("a\nb", "a\nc"),
    "gets an end.py": ("a", "a\n"),
    "empty.py": ("", "a\n"),
    "emptied.py": ("a\n", ""),
    "deleted.py": ("a\nb\n", None),
    "returns.py": ("a\r\nb\r\n", "a\r\nb\rc\r\n"),
    "form feed.py": ("a\x0cb\n", "a\x0cc\x1ed\n"),
    "spaces.py": ("a  \n\n\n", "a\t\n\n \n"),
    "folder/umlaut-ä.py": ("ä\n", "ö\u2028ü\n"),
    "diff.py": ("diff --git a/x b/x\n", "diff --git a/y b/y\n-x\n+y\n"),
    "untracked.py": (None, "x = 1\n"),
    "untracked without end.py": (None, "x = 1\r\ny = 2"),
    "untracked empty.py": (None, ""),
    "unchanged.py": ("a\n", "a\n"),
}
TOKEN = "hf_" + "a" * 34
SECRET = "correct horse battery"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with one commit, whose files differ from it."""
    root = tmp_path / "repository"
    write(root, {name: before for name, (before, _) in EDITS.items()})
    commit_all(root)
    write(root, {name: after for name, (_, after) in EDITS.items()})
    (root / "not used.py").write_text("x = 2\n")
    return root


def write(root: Path, files: dict[str, str | None]) -> None:
    """Write files, and remove those without contents."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_bytes(text.encode())


def collected(root: Path) -> CollectedTree:
    """Return the state of a repository whose untracked files are used by a run."""
    used = [root / name for name, (_, after) in EDITS.items() if after is not None]
    return collect_tree(root, used)


def restored(root: Path, tree: CollectedTree, folder: Path) -> Path:
    """Check out the commit of a tree into a folder, and apply the patch there."""
    assert tree.tree.commit is not None
    git(root, "worktree", "add", "--quiet", "--detach", str(folder), tree.tree.commit)
    patch = folder.with_name("patch")
    patch.write_bytes(tree.patch)
    git(folder, "apply", "--unidiff-zero", "--whitespace=nowarn", str(patch))
    return folder


def test_commit_and_patch_restore_all_files(repository: Path, tmp_path: Path) -> None:
    """The restored folder has the same bytes, and the same patch."""
    tree = collected(repository)
    assert tree.tree.not_saved == []
    assert tree.tree.untracked == sorted(n for n in EDITS if n.startswith("untracked"))
    folder = restored(repository, tree, tmp_path / "restored")
    for name, (_, after) in EDITS.items():
        path = folder / name
        assert (path.read_bytes().decode() if path.exists() else None) == after, name
    assert not (folder / "not used.py").exists()
    again = collected(folder)
    assert again.patch == tree.patch
    assert again.tree.model_copy(update={"folder": str(repository)}) == tree.tree


def test_collecting_leaves_the_repository_as_it_is(repository: Path) -> None:
    """Neither its index nor its files change, even if git could note that a file is unchanged."""
    os.utime(repository / "unchanged.py", (2e9, 2e9))
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    collected(repository)
    after = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    assert after == before


def test_clean_repository_has_no_patch(repository: Path) -> None:
    """A repository without changes is recorded by its commit alone."""
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "more")
    tree = collected(repository)
    assert (tree.tree.patch, tree.patch, tree.tree.untracked) == (None, b"", [])
    assert tree.tree.commit == git(repository, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (f'login("{TOKEN}")', 'login("***")'),
        ('WANDB_API_KEY = "0123456789abcdef"', 'WANDB_API_KEY = "***"'),
        (f'wandb.login(key="{"4e" * 20}")', 'wandb.login(key="***")'),
        ('{"password": "tr0ub4dor&3"}', '{"password": "***"}'),
        ('url = "https://user:hunter22@host/x"', 'url = "https://***@host/x"'),
        (f'x = "{SECRET}"', 'x = "***"'),
        ('tokenizer = load("google/bert_uncased_L-2")', None),
        ("hf_token = os.environ['HF_TOKEN']", None),
        (f'revision = "{"4e" * 20}"', None),
        ("@decorated  # https://example.com/a@b", None),
    ],
)
def test_secret_in_an_added_line_is_hidden(
    line: str, kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tracked files and in others; ordinary code stays as it is."""
    monkeypatch.setenv("SOME_SERVICE_TOKEN", SECRET)
    root = tmp_path / "repository"
    write(root, {"tracked.py": "a\nb\n"})
    commit_all(root)
    write(root, {"tracked.py": f"a\n{line}\nb\n", "other.py": f"{line}\n"})
    tree = collect_tree(root, [root / "other.py"])
    assert tree.patch.decode().count(f"\n+{kept or line}\n") == 2
    assert len(tree.tree.not_saved) == (0 if kept is None else 2)
    folder = restored(root, tree, tmp_path / "restored")
    assert (folder / "other.py").read_text() == f"{kept or line}\n"


def test_files_that_may_hold_secrets_are_left_out(tmp_path: Path) -> None:
    """By their names, by a private key, or by a secret in a removed line."""
    root = tmp_path / "repository"
    tracked = dict.fromkeys((".env", "server.pem", "key.txt", "good.py"), "a\n")
    write(root, {**tracked, "old.py": f'x = "{TOKEN}"\n'})
    commit_all(root)
    write(root, dict.fromkeys(tracked, "SECRET-CONTENT\n"))
    key = "-----BEGIN RSA PRIVATE KEY-----\nSECRET-CONTENT\n"
    write(root, {"key.txt": key, "old.py": "x = None\n", "my_credentials.py": "SECRET-CONTENT\n"})
    write(root, {"good.py": "b\n"})
    tree = collect_tree(root, [root / "my_credentials.py", root / "good.py"])
    left_out = {text.partition(":")[0] for text in tree.tree.not_saved}
    assert left_out == {".env", "server.pem", "key.txt", "old.py", "my_credentials.py"}
    assert b"SECRET-CONTENT" not in tree.patch
    assert TOKEN.encode() not in tree.patch
    assert b"\n+b\n" in tree.patch


def test_large_and_binary_files_are_left_out(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other changes are saved. A patch that is too large as a whole is not."""
    write(repository, {"lines.py": "x" * 200_000, "unchanged.py": "a\0b\n"})
    monkeypatch.setattr("common.run_directory.patches.MAX_BYTES_OF_FILE", 100_000)
    tree = collected(repository)
    assert tree.tree.not_saved[0] == "lines.py: it has 200,000 bytes"
    assert "unchanged.py: it is not text" in tree.tree.not_saved
    assert b"a/deleted.py" in tree.patch
    monkeypatch.setattr(code_tree, "MAX_BYTES", 100)
    tree = collected(repository)
    assert tree.patch == b""
    assert any(text.startswith("all changes") for text in tree.tree.not_saved)


def test_folder_without_a_repository_saves_its_files(tmp_path: Path) -> None:
    """There is no commit, so the patch has all files that a run uses."""
    write(tmp_path, {"train.py": "import model\n", "model.py": "x = 1\n", "other.py": ""})
    tree = collect_tree(tmp_path, [tmp_path / "train.py", tmp_path / "model.py"])
    assert tree.tree.commit is None
    assert tree.tree.untracked == ["model.py", "train.py"]
    assert b"+import model\n" in tree.patch


def test_nothing_fails_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the folder counts as one without a repository."""
    monkeypatch.setenv("PATH", "")
    assert repository_of(repository) is None
    assert collected(repository).tree.commit is None


def test_git_that_hangs_is_ended(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network drive may be gone."""
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("common.system.git.GIT_SECONDS", 0.05)
    assert repository_of(repository) is None


def test_files_that_git_could_not_list_are_not_saved(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They might be in the commit, and a patch that adds them again could not be applied."""

    def ask(folder: Path, *words: str, **limits: int) -> bytes | None:
        return None if "ls-files" in words else ask_git(folder, *words, **limits)

    monkeypatch.setattr(code_tree, "ask_git", ask)
    tree = collected(repository).tree
    assert tree.untracked == []
    assert "files that git does not track, because git can't list them" in tree.not_saved


def test_module_that_is_imported_through_a_link_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has another path than the repository."""
    repository = tmp_path / "real"
    write(repository, {"train.py": "import linked_helper\n"})
    commit_all(repository)
    write(repository, {"lib/linked_helper.py": "x = 1\n"})
    (tmp_path / "link").symlink_to(repository)
    monkeypatch.syspath_prepend(str(tmp_path / "link" / "lib"))
    importlib.import_module("linked_helper")
    try:
        tree, *_ = code_tree.trees_of_process(repository / "train.py", REPOSITORY)
    finally:
        del sys.modules["linked_helper"]
    assert tree.tree.untracked == ["lib/linked_helper.py"]


def test_hook_of_git_does_not_mislead(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a hook, git sets variables that name its own repository."""
    commit = git(repository, "rev-parse", "HEAD")
    other = tmp_path / "other"
    write(other, {"a.py": "a\n"})
    commit_all(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert commit_of(repository) == commit


def test_imported_files_are_those_of_the_user() -> None:
    """Files of Python and of packages count for no repository, and reading them takes seconds."""
    files = code_tree.imported_files()
    assert Path(__file__) in files
    assert Path(code_tree.__file__) in files
    for module in (json, importlib, pytest, torch):
        folder = Path(str(module.__file__)).parent
        assert not any(path.is_relative_to(folder) for path in files)
    assert not any(path.name in ("os.py", "typing.py") for path in files)
