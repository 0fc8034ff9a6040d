"""Finds the mistake in a `metadata.csv` or `metadata.jsonl` beside images, for the message.

`datasets` reads the columns of images from such a file, but does not name it in its errors.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from common.data.reading.json_files import refuse_damaged_json
from common.errors import UserError
from common.system.wording import listed

if TYPE_CHECKING:
    from datasets import DatasetBuilder

# The names of columns with paths. They may also end the name of such a column, after a "_".
PATH_COLUMNS = ("file_name", "file_names")


def refuse_metadata_without_paths(builder: "DatasetBuilder", description: str) -> None:
    """Raise a `UserError` that names a metadata file without the paths of its images.

    The function returns normally if the data set has no such file, or if the file is not local.

    Args:
        description: the data set in words.

    Raises:
        UserError: a metadata file has no column of paths, or a JSON Lines file is damaged.
    """
    if builder.name != "imagefolder":
        return
    for file in map(str, chain(*builder.config.data_files.values())):
        if not is_metadata_file(file, builder) or not os.path.isfile(file):
            continue
        where = f"file {file} of {description}"
        if file.endswith(".jsonl"):
            refuse_damaged_json(file, where)
        columns: Sequence[str] = ()
        with suppress(Exception):  # a file that can't be read does not lack the column
            columns = column_names(file)
        if columns and not any(is_path_column(name) for name in columns):
            raise UserError(
                f"{where} has no column file_name, only {listed(columns)}",
                advice=(
                    "give it a column file_name with the paths of the images beside it, and a "
                    "column such as label with their classes"
                ),
            )


def is_metadata_file(file: str, builder: "DatasetBuilder") -> bool:
    """Whether a builder of image folders reads the columns of images from a file."""
    names = builder.config.metadata_filenames or builder.METADATA_FILENAMES
    return os.path.basename(file) in names


def is_path_column(name: str) -> bool:
    """Whether `datasets` takes a column for the paths of images."""
    return any(name == ending or name.endswith(f"_{ending}") for ending in PATH_COLUMNS)


def column_names(file: str) -> list[str]:
    """Return the names of the columns of a metadata file.

    Raises:
        Exception: an error of a library of any class, if the file can't be read.
    """
    import pandas
    import pyarrow.parquet

    suffix = Path(file).suffix
    if suffix == ".parquet":
        return [*pyarrow.parquet.read_schema(file).names]
    if suffix == ".csv":
        return [str(name) for name in pandas.read_csv(file, nrows=0).columns]
    with open(file, encoding="utf-8") as lines:
        return [*json.loads(next(lines))]
