"""Files of a local data set that are not read: notes on them, and refusals where they matter.

`datasets` skips links and files without a warning.
"""

import os
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from common.data.reading.metadata_files import is_metadata_file
from common.data.reading.split_names import refuse_capitals_in_splits, refuse_file_in_two_splits
from common.data.versions.local_files import (
    TABLE_BUILDERS,
    LocalFiles,
    dangling_error,
    notes_on_dangling_links,
    suffix_of,
)
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
        UserError: a file is in two splits, for example because its class is called test; or its
            path has the name of a split in capital letters; or a link that leads nowhere stands for
            a whole class, table or split.
    """
    data_files = builder.config.data_files or {}
    files_in_splits = [str(file) for file in chain(*data_files.values())]
    refuse_file_in_two_splits(files_in_splits, local_files.folder)
    refuse_capitals_in_splits(builder, local_files)
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
    if builder.name == "imagefolder":
        notes += notes_on_depths(builder, files_in_splits, local_files)
    return notes


def notes_on_depths(
    builder: "DatasetBuilder", files_in_splits: list[str], local_files: LocalFiles
) -> list[str]:
    """Return a note on images that lie deeper or less deep than most: no image has a label then.

    With a metadata file, labels do not come from folders, and there is no note.
    """
    if any(is_metadata_file(file, builder) for file in files_in_splits):
        return []
    depths = {file: local_files.relative(file).count(os.sep) for file in files_in_splits}
    files_by_depth = Counter(depths.values())
    if len(files_by_depth) < 2:
        return []
    ((usual_depth, _),) = files_by_depth.most_common(1)
    unusual = [file for file in files_in_splits if depths[file] != usual_depth]
    images = counted(len(unusual), "image does", "images do")
    example = repr(local_files.relative(unusual[0]))
    return [f"{images} not lie as many folders deep as the others, such as {example}"]
