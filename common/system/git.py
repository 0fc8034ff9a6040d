"""Asks git about a folder, without writing to its repository.

A run records the commit and the changes of its code in this way, so that it can be repeated.
"""

import os
import subprocess
import threading
from pathlib import Path

GIT_SECONDS = 10.0  # seconds after which git is ended
# diff.autoRefreshIndex=false keeps `git diff` from writing to the index.
SETTINGS = ("-c", "core.quotePath=false", "-c", "diff.autoRefreshIndex=false")
# Variables that point git to another repository, as in a hook of git.
FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


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
    if output is None:
        return None
    line = output.decode("utf-8", "surrogateescape").strip()
    return line or None


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


def commit_of_library() -> str | None:
    """Return the commit of the checkout that this library is in; None without a checkout."""
    return commit_of(Path(__file__).parent)
