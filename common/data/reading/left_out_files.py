"""Files of a local data set that are not read: notes on them, and refusals where they matter.

`datasets` skips links and files without a warning.
"""

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from common.data.versions.local_files import (
    TABLE_BUILDERS,
    LocalFiles,
    dangling_error,
    notes_on_dangling_links,
    suffix_of,
)
from common.errors import UserError
from common.system.wording import counted

if TYPE_CHECKING:
    from datasets import DatasetBuilder


def refuse_only_links(local_files: LocalFiles) -> None:
    """Raise a `UserError` if a folder has links that lead nowhere, but no files to read.

    Without this check, `datasets` would report that it finds no file, and not mention the links.
    """
    has_files = any(not local_files.is_hidden(path) for path in local_files.files)
    links = local_files.visible_links()
    if links and not has_files:
        raise dangling_error(local_files, links[0], "a class or split")


def notes_on_files(builder: "DatasetBuilder", local_files: LocalFiles) -> list[str]:
    """Return notes on files that are not read: links that lead nowhere, and files in no split.

    Raises:
        UserError: a file is in two splits, for example because its class is called test; or a link
            that leads nowhere stands for a whole class, table or split.
    """
    data_files = builder.config.data_files or {}
    files_in_splits = [str(file) for file in chain(*data_files.values())]
    refuse_file_in_two_splits(files_in_splits, local_files.folder)
    files_read = set(files_in_splits)
    suffixes = {suffix_of(file) for file in files_read}
    are_tables = builder.name in TABLE_BUILDERS
    # This call refuses a link that stands for a whole class, table or split.
    notes = notes_on_dangling_links(local_files, suffixes, are_tables=are_tables)
    # A file with another suffix, such as a README.md, is not meant to be read.
    unread = [
        path
        for path in local_files.files
        if path not in files_read
        and suffix_of(path) in suffixes
        and not local_files.is_hidden(path)
    ]
    if unread:
        example = repr(local_files.relative(unread[0]))
        files = counted(len(unread), "file is", "files are")
        notes.append(f"{files} in no split and not read, such as {example}")
    return notes


def refuse_file_in_two_splits(files_in_splits: list[str], folder: str) -> None:
    """Raise a `UserError` if a file is in two splits of a data set.

    Without this check, a model could be evaluated on samples on which it was trained.

    Args:
        files_in_splits: the paths of the files of all splits; a file in two splits is here twice.
        folder: the folder of the data set, for the message.
    """
    counts = Counter(files_in_splits)
    repeated = [file for file, count in counts.items() if count > 1]
    if repeated:
        raise UserError(
            f"{repeated[0]} is in two splits of data set {folder}, because its path "
            "contains the names of two splits, or because README.md lists it in both",
            advice="rename the file or its folder, or correct data_files in README.md",
        )
