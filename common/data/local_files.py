"""The files of a local data set, also through symbolic links, and what identifies them."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError

# Tables up to this many bytes are identified by their content, up to so many bytes in all.
SMALL_BYTES = 2**22
MOST_BYTES_READ = 2**26
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
READ_WHOLE = {*TABLE_SUFFIXES, ".md", ".txt", ".yaml", ".yml"}
# A folder that links lead to more often than this is one of a maze without end.
MOST_VISITS = 16
HIDDEN = re.compile(r"(^|/)(\.|__[Mp])")  # as `datasets` ignores them


@dataclass
class LocalFiles:
    """What lies in a folder, links followed."""

    folder: str
    files: dict[str, os.stat_result] = field(default_factory=dict)  # by path, sorted
    linked_folders: set[str] = field(default_factory=set)  # paths of links to folders
    dangling: list[str] = field(default_factory=list)  # paths of links that lead nowhere, sorted

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def is_hidden(self, path: str) -> bool:
        return HIDDEN.search(self.relative(path)) is not None


def find_files(folder: Path) -> LocalFiles:
    """Return all files under a folder.

    A link to a folder that holds the link itself is not followed: the files there are listed
    already.

    Raises:
        OSError: a folder cannot be listed.
        UserError: links lead to one folder again and again.
    """
    found = LocalFiles(str(folder))
    visits = Counter[tuple[int, int]]()

    def visit(path: str, above: tuple[tuple[int, int], ...]) -> None:
        with os.scandir(path) as entries:
            listed = list(entries)
        for entry in listed:
            try:
                status = entry.stat()
                is_folder = entry.is_dir()
            except OSError:
                if not entry.is_symlink():
                    raise
                found.dangling.append(entry.path)
                continue
            if not is_folder:
                if entry.is_file():
                    found.files[entry.path] = status
                continue
            place = (status.st_dev, status.st_ino)
            if entry.is_symlink():
                if place in above:
                    continue
                found.linked_folders.add(entry.path)
            visits[place] += 1
            if visits[place] > MOST_VISITS:
                advice = "remove the links that lead back to it"
                raise UserError(f"links in {folder} lead to {entry.path} again and again: {advice}")
            visit(entry.path, (*above, place))

    top = os.stat(folder)
    visit(str(folder), ((top.st_dev, top.st_ino),))
    found.files = dict(sorted(found.files.items()))
    found.dangling.sort()
    return found


def identify(files: dict[str, os.stat_result]) -> list[list[Any]]:
    """Return what changes when the content of files does, even at the same size and time.

    Small tables are read. Of other files it is the inode and the time of the last change of status
    (ctime), which no program sets back as it can set back the time of modification.
    """
    identities: list[list[Any]] = []
    left = MOST_BYTES_READ
    for path, status in files.items():
        is_table = os.path.splitext(path)[1].lower() in READ_WHOLE
        if is_table and status.st_size <= min(SMALL_BYTES, left):
            left -= status.st_size
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            identities.append([path, status.st_size, digest])
        else:
            times = status.st_mtime_ns, status.st_ctime_ns
            identities.append([path, status.st_size, *times, status.st_ino])
    return identities


@contextmanager
def following(linked_folders: set[str]) -> Iterator[None]:
    """Let `datasets` look into folders that are symbolic links, which it passes over by itself."""
    from fsspec.implementations.local import LocalFileSystem

    if not linked_folders:
        yield
        return
    info_of = LocalFileSystem.info

    def info(file_system: LocalFileSystem, path: Any, **options: Any) -> dict[str, Any]:
        facts = info_of(file_system, path, **options)
        if facts.get("islink") and facts["name"] in linked_folders:
            facts["type"] = "directory"
        return facts

    LocalFileSystem.info = info  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalFileSystem.info = info_of  # type: ignore[method-assign]


def dangling_note(found: LocalFiles, suffixes: set[str], *, are_tables: bool) -> list[str]:
    """Say which links of a data set lead nowhere.

    Args:
        suffixes: those of the files that are read.
        are_tables: whether these are tables and not images, one of many.

    Raises:
        UserError: a class or a table would be missing as a whole.
    """
    dangling = [path for path in found.dangling if not found.is_hidden(path)]
    advice = "fetch what they link to (git annex get, dvc pull), or remove the links"
    readable = [path for path in found.files if os.path.splitext(path)[1].lower() in suffixes]
    has_data = {os.path.dirname(path) for path in readable}
    # Links without a suffix may stand for folders, as beside the folders of other classes.
    has_folders = {os.path.dirname(path) for path in has_data}
    count = 0
    for path in dangling:
        suffix = os.path.splitext(path)[1].lower()
        parent = os.path.dirname(path)
        is_folder = parent in has_folders and (suffix not in suffixes or suffix == "")
        is_missing_table = suffix in suffixes and are_tables
        is_empty_class = suffix in suffixes and parent not in has_data
        if is_folder or is_missing_table or is_empty_class or not readable:
            whole = "a split" if is_missing_table else "a class or split"
            where = (
                f"data set {found.folder}: {found.relative(path)!r} is a link that leads nowhere"
            )
            raise UserError(f"{where}, and {whole} would be missing: {advice}")
        count += suffix in suffixes
    if not count:
        return []
    total = count + sum(not found.is_hidden(path) for path in readable)
    first = next(path for path in dangling if os.path.splitext(path)[1].lower() in suffixes)
    example = repr(found.relative(first))
    return [f"{count:,} of {total:,} files are links that lead nowhere, as {example}: {advice}"]
