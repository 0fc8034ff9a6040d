"""Files of a local data set that are not read: notes on them, and refusals where they matter.

`datasets` skips links and files without a warning.
"""

import os
import re
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


# The split that a word in the path of a file stands for, as `datasets` understands it.
SPLIT_BY_NAME = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "val": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


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
        notes += notes_on_depths(files_in_splits, local_files)
    return notes


def notes_on_depths(files_in_splits: list[str], local_files: LocalFiles) -> list[str]:
    """Return a note on images that lie deeper or less deep than most: no image has a label then.

    With a metadata file, labels do not come from folders, and there is no note.
    """
    if any(os.path.basename(file).startswith("metadata.") for file in files_in_splits):
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


def refuse_capitals_in_splits(builder: "DatasetBuilder", local_files: LocalFiles) -> None:
    """Raise a `UserError` if a path has a split's name with capital letters, such as Test.csv.

    `datasets` only knows the names in lower case. Without this check, a model would be trained on
    Test.csv, which counts as a part of the split train. A file that is in the right split all the
    same, because README.md says so, is not refused.
    """
    split_of = {
        str(file): str(split)
        for split, files in (builder.config.data_files or {}).items()
        for file in files
    }
    suffixes = {suffix_of(file) for file in split_of}
    for path in local_files.files:
        if suffix_of(path) not in suffixes or local_files.is_hidden(path):
            continue
        word = capital_split_name(
            local_files.relative(path), has_classes=builder.name not in TABLE_BUILDERS
        )
        if word is None or split_of.get(path) == SPLIT_BY_NAME[word.lower()]:
            continue
        raise UserError(
            f"{path} is not read as data of the split {SPLIT_BY_NAME[word.lower()]}, because "
            f"{word!r} in its path has a capital letter",
            advice=f"write {word.lower()} in the name of the file or folder",
        )


def capital_split_name(relative_path: str, *, has_classes: bool) -> str | None:
    """Return the part of a path that is a split's name, apart from capital letters; or None.

    Args:
        has_classes: whether the folder of a file is its class, such as Train in pictures of
            vehicles. Its name and the file's own are then left out.
    """
    *folders, file_name = relative_path.split(os.sep)
    names = folders[:-1] if has_classes else [*folders, os.path.splitext(file_name)[0]]
    for name in names:
        for word in re.split(r"[-._ 0-9]+", name):  # the separators that `datasets` knows
            if word.lower() in SPLIT_BY_NAME and word != word.lower():
                return word
    return None


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
