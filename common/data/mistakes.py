"""The errors for mistakes in a user's data that more than one reader can find.

Tables, streamed parquet files and a recipe's own splits are read by different modules. The same
mistake gets the same sentence in all of them.
"""

from collections.abc import Mapping

from common.data.guess import Feature
from common.errors import UserError


def empty_split(
    data_set: str,
    split: str,
    advice: str = "add rows to the files of this split, or remove these files",
) -> UserError:
    """Return the error for a split without samples."""
    return UserError(f"split {split} of data set {data_set} is empty", advice=advice)


def nothing_left(data_set: str, split: str, required: str) -> UserError:
    """Return the error for a split whose rows all lack something.

    Args:
        required: what the rows lack: label, text or image.
    """
    flags = {"label": " with --label-column", "text": " with --text-columns"}
    flag = flags.get(required, "")
    return UserError(
        f"the rows of split {split} of data set {data_set} have no {required}s",
        advice=f"fill in the {required}s in the data, or name another column{flag}",
    )


def single_class(data_set: str, split: str) -> UserError:
    """Return the error for a split in which there is nothing to classify."""
    return UserError(
        f"all rows of split {split} of data set {data_set} have the same label, but classification "
        "needs at least two classes",
        advice="add rows of another class, or name another column with --label-column",
    )


def other_columns(
    file: str, columns: Mapping[str, Feature], first_file: str, expected: Mapping[str, Feature]
) -> UserError:
    """Return the error for a file whose columns are not those of the first file.

    Args:
        columns: the types of the file's columns, by name.
        expected: the types of the first file's columns, by name.
    """
    names = {**expected, **columns}
    differing = ", ".join(name for name in names if expected.get(name) != columns.get(name))
    return UserError(
        f"{file} and {first_file} have different columns, by name or type: {differing}",
        advice=(
            "give all files the same columns, with the same types, or move a file that does not "
            "belong to these data, such as an unlabelled test set, out of the folder"
        ),
    )
