"""The dialects of a data set's CSV files, and the arguments with which `datasets` reads them."""

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from common.data.reading.csv_files import DEFAULT, SEPARATORS, Dialect, find_dialect
from common.data.sources import DataSource
from common.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder


class CsvOptions(TypedDict, total=False):
    """The arguments with which `datasets`, and pandas within it, read a CSV file."""

    keep_default_na: bool
    na_values: list[str]
    sep: str
    encoding: str


def find_dialects(builder: "DatasetBuilder") -> dict[str, Dialect]:
    """Return the dialect of each local CSV file by its path.

    The result is empty if the builder reads all files correctly without stated dialects. This is
    so if the files are not CSV, if the data set's README states the dialect, or if all files are
    written as the builder expects.

    Raises:
        UserError: `find_dialect` refuses a file, or a `metadata.csv` beside images is not in UTF-8
            with commas.
    """
    data_files = builder.config.data_files or {}
    files = [str(file) for file in chain(*data_files.values())]
    paths = [file for file in files if os.path.isfile(file)]  # without files on the Hub
    if builder.name != "csv":
        check_metadata_files(paths)
        return {}
    if builder.config.encoding is not None or builder.config.sep not in SEPARATORS:
        return {}  # the README of the data set states the dialect
    tables = [file for file in paths if file.lower().endswith((".csv", ".tsv"))]
    dialects = {file: find_dialect(file) for file in tables}
    expected = Dialect(builder.config.sep, "utf-8")
    if all(dialect == expected for dialect in dialects.values()):
        return {}
    return dialects


def check_metadata_files(paths: list[str]) -> None:
    """Raise a `UserError` if a `metadata.csv` beside images is not in UTF-8 with commas.

    `datasets` reads these files without options, so a dialect can't be stated for them.

    Args:
        paths: the local files of the data set.
    """
    for path in paths:
        if os.path.basename(path) != "metadata.csv":
            continue
        dialect = find_dialect(path)
        if dialect != DEFAULT:
            raise UserError(
                f"{path} can't be read, because it is {dialect}",
                advice="save the file in UTF-8, with commas between the columns",
            )


def dialect_notes(dialects: dict[str, Dialect], source: DataSource) -> list[str]:
    """Return a note on each unusual dialect, with the first file that is written in it.

    The user can see from it whether the dialect was inferred correctly.
    """
    # Later entries replace earlier ones, so the files are reversed to keep the first of a dialect.
    first_files = {dialect: file for file, dialect in reversed(dialects.items())}
    return [
        f"{os.path.relpath(file, Path(source.location).parent)} is {dialect}"
        for dialect, file in first_files.items()
        if dialect != DEFAULT
    ]


def csv_options(dialect: Dialect | None) -> CsvOptions:
    """Return the arguments with which `datasets` reads a CSV file.

    Only an empty cell is a missing value. A cell that reads NA, null or None is a class or a text.

    Args:
        dialect: None if `datasets` reads the file correctly without stated separator and encoding.
    """
    options: CsvOptions = {"keep_default_na": False, "na_values": [""]}
    if dialect is not None:
        options["sep"] = dialect.separator
        options["encoding"] = dialect.encoding
    return options
