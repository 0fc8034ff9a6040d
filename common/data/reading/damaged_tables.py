"""Finds the damaged table of a data set that can't be read, because `datasets` does not name it."""

import tempfile
from itertools import chain
from typing import TYPE_CHECKING

from common.data.labelled_data.guess import Feature
from common.data.mistakes import other_columns_error
from common.data.reading.builders import glob_pattern
from common.data.reading.csv_dialects import CsvOptions, csv_options
from common.data.reading.csv_files import RAGGED_ADVICE, Dialect
from common.data.reading.json_files import refuse_damaged_json
from common.data.versions.local_files import TABLE_BUILDERS
from common.errors import UserError
from common.failures.sentences import reading

if TYPE_CHECKING:
    from datasets import DatasetBuilder


def refuse_damaged_table(
    builder: "DatasetBuilder", dialects: dict[str, Dialect], description: str
) -> None:
    """Raise a `UserError` that names the damaged table, if there is one.

    `datasets` does not name a damaged file, so this function reads each table alone. It returns
    normally if the data set is not made of tables, or if all tables can be read and fit together.

    Raises:
        UserError: a table can't be read, or its columns differ from those of the first table.
    """
    if builder.name not in TABLE_BUILDERS:
        return
    first_file = ""
    expected: dict[str, Feature] = {}
    remedy = "copy the file again from where it came, or remove it"
    if builder.name == "csv":
        remedy = RAGGED_ADVICE
    for file in chain(*builder.config.data_files.values()):
        options = csv_options(dialects.get(str(file))) if builder.name == "csv" else {}
        where = f"file {file} of {description}"
        # On Windows, files that `datasets` has mapped can't be removed. They stay in the system's
        # folder of temporary files.
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with folder as cache, reading(where, remedy):
            features = features_of(builder.name, file, where, cache, options)
        first_file = first_file or str(file)
        expected = expected or features
        if features != expected:
            raise other_columns_error(where, features, first_file, expected)


def features_of(
    builder_name: str, file: str, where: str, cache: str, options: CsvOptions
) -> dict[str, Feature]:
    """Read one table alone, and return the type of each column by the column's name.

    Args:
        where: the file in words, for a message.
        cache: the folder in which `datasets` stores what it has read.
        options: the options of a CSV file; empty for a table of another format.

    Raises:
        UserError: the table has no rows, or a line of a JSON file is damaged.
        Exception: an error of `datasets` of any class, if the table can't be read.
    """
    import datasets

    try:
        table = datasets.load_dataset(
            builder_name, data_files=[glob_pattern(file)], split="train", cache_dir=cache, **options
        )
    except Exception as problem:
        if "corresponds to no data" in str(problem):
            raise UserError(
                f"{file} has no rows", advice="add rows to this file, or remove it"
            ) from None
        if builder_name == "json":
            refuse_damaged_json(file, where)
        raise
    return table.features
