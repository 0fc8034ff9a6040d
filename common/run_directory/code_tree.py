"""Collects the code of a run: its git commit, and a patch with the differences from that commit.

``git apply --unidiff-zero`` applies a patch. Secrets are kept out of it: *** replaces text that
looks like a secret in an added line, and files with names such as ``.env`` are left out.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from common.digests import sha256_of_bytes
from common.run_directory.records import CodeTree
from common.system.installed_code import is_in_standard_library, is_installed
from common.system.printable import without_secrets

MAX_BYTES_OF_FILE = 2**20
MAX_BYTES = 4 * 2**20  # the largest patch
MAX_FILES = 1000  # changed files; with more of them, git's command line would be too long
GIT_SECONDS = 10.0  # seconds after which git is ended
# diff.autoRefreshIndex=false keeps `git diff` from writing to the index.
SETTINGS = ("-c", "core.quotePath=false", "-c", "diff.autoRefreshIndex=false")
# Variables that point git to another repository, as in a hook of git.
FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
SECRET_FILES = (
    ".env",
    ".env.*",
    "*.env",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".pypirc",
    "*credentials*",
    "*secrets.*",
    "secret.*",
    "kaggle.json",
)
# The value of an environment variable is a secret if its name ends with one of these words.
SECRET_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS")
MIN_SECRET = 8  # characters; a shorter value may be an ordinary word
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
FIRST_LINE = "diff --git "  # the beginning of a file's part in a patch
MASKED = "*** stands for what looks like a secret"  # a problem in `CodeTree.not_saved`


@dataclass(frozen=True)
class CollectedTree:
    """A folder of code, with the contents of its patch."""

    tree: CodeTree
    patch: bytes


def ask_git(folder: Path, *words: str, most_bytes: int = 2**26) -> bytes | None:
    """Return the output of a git command.

    The result is None if git is not installed, or if the command fails, takes longer than
    `GIT_SECONDS` or prints more than `most_bytes`. A command that only reads takes no locks and
    leaves the index as it is: see `SETTINGS` and `git_environment`.
    """
    command = ["git", "-C", str(folder), *SETTINGS, *words]
    try:
        process = subprocess.Popen(
            command,
            env=git_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    timer = threading.Timer(GIT_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read(most_bytes + 1)
        if len(output) > most_bytes:
            process.kill()
        status = process.wait()
    finally:
        timer.cancel()
    return output if status == 0 and len(output) <= most_bytes else None


def git_environment() -> dict[str, str]:
    """Return the variables for a git command that takes no locks and asks no questions."""
    kept_variables = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {**kept_variables, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def line_of_git(folder: Path, *words: str) -> str | None:
    """Return the single line that a git command prints; None if it prints nothing or fails."""
    output = ask_git(folder, *words)
    return None if not output else output.decode("utf-8", "surrogateescape").strip() or None


def repository_of(folder: Path) -> Path | None:
    """Return the top folder of the git repository that a folder is in.

    The result is None if the folder is in no repository, or in one without a commit.
    """
    if line_of_git(folder, "rev-parse", "--verify", "--quiet", "HEAD") is None:
        return None
    top = line_of_git(folder, "rev-parse", "--show-toplevel")
    return None if top is None else Path(top).resolve()


def commit_of(folder: Path) -> str | None:
    """Return the commit that a folder's repository has checked out.

    The result is None if the folder is in no repository, or in one without a commit.
    """
    return line_of_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")


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
    """Return the Python files that this process has imported.

    Files of Python and of installed packages are left out. Files of `common` are included, unlike
    in `common.flag_uses`, because they are needed to repeat a run.
    """
    files = set()
    for module in list(sys.modules.values()):  # another thread may import at the same time
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py") or not os.path.isabs(name):
            continue
        path = Path(name)
        is_of_python = is_in_standard_library(name) or path.is_relative_to(sys.prefix)
        if not is_of_python and not is_installed(path):
            files.add(path)
    return files


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
    parts: list[str] = []
    not_saved: list[str] = []
    untracked = names
    if commit is not None:
        changes, not_saved = changes_of(root)
        parts += changes
        untracked = untracked_of(root, names)
    saved_untracked = []
    for name in untracked:
        part, problem = new_file(root, name)
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
        hidden, problem = without_secret_lines(part)
        if problem is not None:
            not_saved.append(f"{file_of_patch(part)}: {problem}")
        if hidden is not None:
            parts.append(hidden)
    return parts, not_saved


def split_patch(patch: str) -> list[str]:
    """Split a patch into one part for each file."""
    parts: list[str] = []
    for line in lines_of(patch):
        if line.startswith(FIRST_LINE) or not parts:
            parts.append("")
        parts[-1] += line
    return parts


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with their line feeds.

    Only a line feed ends a line, as in git. `str.splitlines` knows further ends of lines.
    """
    lines = text.split("\n")
    whole = [f"{line}\n" for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def file_of_patch(part: str) -> str:
    """Return the file that a part of a patch changes."""
    names = part.split("\n", 1)[0].removeprefix(FIRST_LINE)
    return names[: len(names) // 2].removeprefix("a/")  # "a/NAME b/NAME"


def untracked_of(root: Path, names: Sequence[str]) -> list[str]:
    """Return those of the files `names` that git does not track; ignored files are included."""
    paths = [f":(top,literal){name}" for name in names]
    output = ask_git(root, "ls-files", "-z", "--", *paths) if paths else b""
    tracked = {*(output or b"").decode("utf-8", "surrogateescape").split("\0")}
    return [name for name in names if name not in tracked]


def reason_to_leave_out(path: Path) -> str | None:
    """Return the reason why a file must not be in a patch; None if it may be there."""
    if any(fnmatch(path.name.lower(), pattern) for pattern in SECRET_FILES):
        return "files with such names hold secrets"
    try:
        size = path.lstat().st_size
    except OSError:
        # If git tracks the file, the file was deleted, and the patch removes it. If git does not
        # track it, `new_file` reports that it can't be read.
        return None
    return f"it has {size:,} bytes" if size > MAX_BYTES_OF_FILE else None


def new_file(root: Path, name: str) -> tuple[str | None, str | None]:
    """Return a patch that adds a file, and why the patch is None or has a masked secret.

    The reason is None if the patch is complete.
    """
    reason = reason_to_leave_out(root / name)
    if reason is not None:
        return None, reason
    try:
        text = (root / name).read_bytes().decode("utf-8")
    except (OSError, UnicodeError) as error:
        return None, f"it can't be read ({type(error).__name__})"
    lines = lines_of(text)
    header = [f"{FIRST_LINE}a/{name} b/{name}\n", "new file mode 100644\n"]
    if lines:
        header += ["--- /dev/null\n", f"+++ b/{name}\n", f"@@ -0,0 +1,{len(lines)} @@\n"]
    body = [f"+{line}" for line in lines]
    if lines and not lines[-1].endswith("\n"):
        body[-1] += "\n\\ No newline at end of file\n"
    return without_secret_lines("".join([*header, *body]))


def without_secret_lines(part: str) -> tuple[str | None, str | None]:
    """Return a file's part of a patch without secrets, and a reason as in `new_file`.

    A secret in a line that the patch adds is masked. The part is None in three cases:

    - A secret is in any other line. Git could not apply the patch if that line was masked.
    - A private key begins. It goes on in the next lines, which don't look like secrets.
    - The file is not text.
    """
    if "\nBinary files " in part or "\nGIT binary patch\n" in part:
        return None, "it is not text"
    values = secrets_of_environment()
    lines = []
    is_masked = False
    for line in lines_of(part):
        hidden = without_secrets(line, values)
        if hidden == line:
            lines.append(line)
            continue
        begins_private_key = hidden == "***"  # `without_secrets` then replaces the whole line
        if not line.startswith("+") or begins_private_key:
            return None, "it has what looks like a secret"
        lines.append(hidden)
        is_masked = True
    return "".join(lines), MASKED if is_masked else None


def secrets_of_environment() -> list[str]:
    """Return the values of this process's environment variables whose names mark secrets.

    Values shorter than `MIN_SECRET` are left out.
    """
    return [
        value
        for name, value in os.environ.items()
        if name.upper().endswith(SECRET_VARIABLES) and len(value) >= MIN_SECRET
    ]
