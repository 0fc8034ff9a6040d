"""A digest of the code that a measurement depends on, without comments and docstrings."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.resume.attempt import Attempt
from benchmarks.resume.contestants import LOOPS, Contestant
from benchmarks.resume.stopping import SOURCE

# How trainings are killed and counted. Each contestant's loop comes with all that it imports.
DRIVER = ("training.py", "failures.py", "stopping.py", "measuring.py", "counting.py")
CODE_FOLDERS = ("benchmarks", "common")
# The driver imports these. They hold all contestants, drawn kills and the file of results: a new
# contestant or field changes no measurement.
NO_PART = ("contestants.py", "kills.py", "results.py", "digest.py")


def digest_of_measurement(contestant: Contestant) -> str:
    """Return a digest of the contestant's loop, its commands, and how it is killed and counted."""
    start = LOOPS / contestant.script
    driver = [LOOPS.parent / name for name in DRIVER]
    left_out = {LOOPS.parent / name for name in NO_PART}
    files = sorted(with_imports([start, *driver], left_out))
    parts = [
        f"{file.relative_to(REPOSITORY)} {normalized(file.read_text(encoding='utf-8'))}"
        for file in files
    ]
    parts += [SOURCE.read_text(encoding="utf-8"), *settings_of(contestant)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def settings_of(contestant: Contestant) -> Iterator[str]:
    """Yield what the contestant's entry in the table of contestants makes of a training."""
    folder = Path("FOLDER")
    attempts = (Attempt(0, contestant.variant), Attempt(1, contestant.variant, is_resumed=True))
    for attempt in attempts:
        for processes in (1, 2):
            # The first word is the path of Python.
            words = contestant.command(folder, attempt, processes, port=0)[1:]
            yield " ".join(words).replace(str(REPOSITORY), "REPOSITORY")
    yield f"{contestant.variant} {contestant.needs_path}"
    for function in (contestant.newest_checkpoint, contestant.logged_steps):
        yield normalized(textwrap.dedent(inspect.getsource(function)))


def normalized(code: str) -> str:
    """Return code as its syntax tree, without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def with_imports(files: list[Path], left_out: Collection[Path] = ()) -> set[Path]:
    """Return files with all files of this repository that they import, directly or not.

    Args:
        left_out: files that do not count, nor does what only they import.
    """
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in found or file in left_out:
            continue
        found.add(file)
        waiting += imported_files(file)
    return found


def imported_files(file: Path) -> Iterator[Path]:
    """Yield the files of this repository that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            yield from files_of_module(name)


def files_of_module(name: str) -> Iterator[Path]:
    """Yield the file of a module of this repository, if it is one."""
    words = name.split(".")
    if words[0] not in CODE_FOLDERS:
        return
    path = REPOSITORY.joinpath(*words)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            yield candidate
