"""Lists the files of a local data set, also those behind symbolic links, for `datasets` to read.

By default, `datasets` skips links to folders and links that lead nowhere, and says nothing.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError

# The builder of `datasets` that reads a single file, by the file's suffix.
FILE_BUILDERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
TABLE_SUFFIXES = tuple(FILE_BUILDERS)
TABLE_BUILDERS = frozenset(FILE_BUILDERS.values())
# If links lead to one folder more often than this, the search for files might never end.
MAX_VISITS = 16
# The advice for links that lead nowhere.
FETCH_ADVICE = (
    "fetch the files (for example with git annex get or dvc pull), or correct or remove the links"
)
# Paths that `datasets` ignores and that hold no data: hidden ones, __MACOSX and __pycache__. It
# ignores other folders such as __cat as well, but one may be a class, so the user is told of it.
HIDDEN = re.compile(r"(^|/)(\.|__[Mp])")


def suffix_of(path: str) -> str:
    """Return a file's suffix in lower case, such as ``.jpg``; empty if it has none."""
    return os.path.splitext(path)[1].lower()


@dataclass
class LocalFiles:
    """The files in a folder and its subfolders; symbolic links are followed."""

    folder: str
    files: dict[str, os.stat_result] = field(default_factory=dict)  # by path, sorted
    linked_folders: set[str] = field(default_factory=set)  # paths of links to folders
    dangling: list[str] = field(default_factory=list)  # paths of links that lead nowhere, sorted

    def relative(self, path: str) -> str:
        """Return a path from the folder of the data set."""
        return os.path.relpath(path, self.folder)

    def is_hidden(self, path: str) -> bool:
        """Whether `datasets` ignores a file because of its name or a folder's name."""
        return HIDDEN.search(self.relative(path)) is not None

    def visible_links(self) -> list[str]:
        """Return the paths of links that lead nowhere, and whose files `datasets` would read.

        It would ignore a hidden file in any case, so no data are missing.
        """
        return [path for path in self.dangling if not self.is_hidden(path)]


def find_files(folder: Path) -> LocalFiles:
    """Return all files under a folder; symbolic links are followed.

    The fingerprint of a local data set covers these files. The notes on missing and unread files
    come from them, too.

    A link to a folder that contains the link itself is not followed, because the files there are
    listed anyway.

    Raises:
        OSError: a folder can't be listed, or a file's status can't be read.
        UserError: links lead to one folder more than `MAX_VISITS` times.
    """
    local_files = LocalFiles(str(folder))
    FileSearch(local_files).list_folder(str(folder), (identity_of(os.stat(folder)),))
    local_files.files = dict(sorted(local_files.files.items()))
    local_files.dangling.sort()
    return local_files


# The device and inode of a folder, which are the same on every path to it.
FolderIdentity = tuple[int, int]


def identity_of(status: os.stat_result) -> FolderIdentity:
    """Return a folder's identity, by which a link back to a parent folder is recognised."""
    return status.st_dev, status.st_ino


@dataclass
class FileSearch:
    """A search for all files under a folder: see `find_files`."""

    listing: LocalFiles  # the files and links that were found
    visits: Counter[FolderIdentity] = field(default_factory=Counter)

    def list_folder(self, path: str, parents: tuple[FolderIdentity, ...]) -> None:
        """Add all files under a folder to the listing.

        Args:
            parents: this folder and the folders on the way to it from the first folder.

        Raises:
            OSError: a folder can't be listed, or a file's status can't be read.
        """
        with os.scandir(path) as iterator:
            entries = list(iterator)
        for entry in entries:
            try:
                is_folder = entry.is_dir()
                # Device and inode tell folders apart. On Windows, `entry.stat()` lacks both.
                status = os.stat(entry.path) if is_folder else entry.stat()
            except OSError:
                if not entry.is_symlink():
                    raise
                # It is a link that leads nowhere.
                self.listing.dangling.append(entry.path)
                continue
            if is_folder:
                self.enter(entry, identity_of(status), parents)
            elif entry.is_file():  # not a socket or a device, for example
                self.listing.files[entry.path] = status

    def enter(
        self,
        folder: os.DirEntry[str],
        identity: FolderIdentity,
        parents: tuple[FolderIdentity, ...],
    ) -> None:
        """Add all files under a folder or a link to a folder.

        A link to a folder that contains the link is left out.

        Folders that link to each other can have a vast number of paths, so the number of visits to
        a folder is limited.

        Args:
            parents: the folders on the way from the first folder to the one that `folder` is in.

        Raises:
            UserError: links lead to the folder too often.
        """
        if folder.is_symlink():
            if identity in parents:
                return
            self.listing.linked_folders.add(folder.path)
        self.visits[identity] += 1
        if self.visits[identity] > MAX_VISITS:
            raise UserError(
                f"{self.listing.folder} leads to {os.path.realpath(folder.path)} more than "
                f"{MAX_VISITS} times through links",
                advice="remove links to this folder, or copy its files to where they are needed",
            )
        self.list_folder(folder.path, (*parents, identity))


@contextmanager
def following(linked_folders: set[str]) -> Iterator[None]:
    """Let `datasets` look into folders that are symbolic links, which it skips by default.

    Within this context, the file system of `fsspec`, with which `datasets` lists files, reports
    these links as folders.

    Args:
        linked_folders: paths of the links.
    """
    from fsspec.implementations.local import LocalFileSystem

    if not linked_folders:
        yield
        return
    info_of = LocalFileSystem.info

    def info(
        file_system: LocalFileSystem, path: str | os.PathLike[str], **options: object
    ) -> dict[str, object]:
        facts = info_of(file_system, path, **options)
        if facts.get("islink") and facts["name"] in linked_folders:
            facts["type"] = "directory"
        return facts

    LocalFileSystem.info = info  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalFileSystem.info = info_of  # type: ignore[method-assign]


def notes_on_dangling_links(
    local_files: LocalFiles, suffixes: set[str], *, are_tables: bool
) -> list[str]:
    """Return a note on links to images that lead nowhere; an empty list without such links.

    Tools such as git-annex and DVC leave such links instead of files that were not fetched. The
    run goes on if some of many images are missing, but not without a whole class, table or split.

    Args:
        suffixes: the suffixes of files that are read, in lower case. A link with another suffix is
            ignored, unless it may stand for a folder or there are no files to read.
        are_tables: whether these files are tables.

    Raises:
        UserError: a whole class, table or split would be missing.
    """
    readable = [path for path in local_files.files if suffix_of(path) in suffixes]
    folders_with_data = {os.path.dirname(path) for path in readable}
    # If a link lies beside folders with data, it may stand for the folder of another class.
    parents_of_folders = {os.path.dirname(folder) for folder in folders_with_data}
    missing_images: list[str] = []  # links that stand for single images
    for path in local_files.visible_links():
        suffix = suffix_of(path)
        parent = os.path.dirname(path)
        # A link without a suffix may stand for a folder even if files without a suffix are read.
        has_suffix_of_folder = suffix == "" or suffix not in suffixes
        may_be_folder = has_suffix_of_folder and parent in parents_of_folders
        is_missing_table = suffix in suffixes and are_tables
        # The link's folder has no other file that is read.
        is_empty_class = suffix in suffixes and parent not in folders_with_data
        if may_be_folder or is_missing_table or is_empty_class or not readable:
            missing = "a split" if is_missing_table else "a class or split"
            raise dangling_error(local_files, path, missing)
        if suffix in suffixes:
            missing_images.append(path)
    if not missing_images:
        return []
    count = len(missing_images)
    total = count + sum(not local_files.is_hidden(path) for path in readable)
    example = repr(local_files.relative(missing_images[0]))
    return [
        f"{count:,} of {total:,} files are links to missing files, such as {example}: "
        f"{FETCH_ADVICE}"
    ]


def dangling_error(local_files: LocalFiles, path: str, missing: str) -> UserError:
    """Return the error for a link that leads nowhere, without whose file the run can't go on.

    Args:
        path: the path of the link.
        missing: what would be missing without the file, such as "a split".
    """
    return UserError(
        f"{local_files.relative(path)!r} in data set {local_files.folder} is a link to a missing "
        f"file, so {missing} would be missing",
        advice=FETCH_ADVICE,
    )
