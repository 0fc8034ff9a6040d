"""Refuses files whose paths name the wrong split, or two splits."""

import os
import re
from collections import Counter
from typing import TYPE_CHECKING

from common.data.versions.local_files import TABLE_BUILDERS, LocalFiles, suffix_of
from common.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder


def refuse_capitals_in_splits(builder: "DatasetBuilder", local_files: LocalFiles) -> None:
    """Raise a `UserError` if a path has a split's name with capital letters, such as Test.csv.

    `datasets` only knows the names in lower case. Without this check, a model would be trained on
    Test.csv, which counts as a part of the split train. A file that is in the right split all the
    same, because README.md says so, is not refused.
    """
    data_files = builder.config.data_files or {}
    split_of = {str(file): str(split) for split, files in data_files.items() for file in files}
    suffixes = {suffix_of(file) for file in split_of}
    has_classes = builder.name not in TABLE_BUILDERS
    for path in local_files.files:
        if suffix_of(path) not in suffixes or local_files.is_hidden(path):
            continue
        word = capital_split_name(local_files.relative(path), has_classes=has_classes)
        if word is None:
            continue
        split = split_named(word.lower())
        if split_of.get(path) != split:
            raise UserError(
                f"{path} is not read as data of the split {split}, because {word!r} in its path "
                "has a capital letter",
                advice=f"write {word.lower()} in the name of the file or folder",
            )


def capital_split_name(relative_path: str, *, has_classes: bool) -> str | None:
    """Return the part of a path that is a split's name, apart from capital letters; or None.

    Args:
        has_classes: whether the folder of a file is its class, such as Train in pictures of
            vehicles. Its name and the file's own are then left out.
    """
    from datasets.data_files import NON_WORDS_CHARS

    *folders, file_name = relative_path.split(os.sep)
    names = folders[:-1] if has_classes else [*folders, os.path.splitext(file_name)[0]]
    for name in names:
        for word in re.split(f"[{NON_WORDS_CHARS}]", name):
            if word != word.lower() and split_named(word.lower()) is not None:
                return word
    return None


def split_named(word: str) -> str | None:
    """Return the split that `datasets` takes a word in a path for; None for any other word."""
    from datasets.data_files import SPLIT_KEYWORDS

    for split, keywords in SPLIT_KEYWORDS.items():
        if word in keywords:
            return str(split)
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
