"""The row groups of streamed data, as the cache describes them.

A row group is a block of rows of a parquet file, which is read as a whole.
"""

from typing import TypedDict

# Columns of the array that describes the row groups of a split: int64 [row groups, 5].
SHARD = 0  # index into the list of files
PLACE = 1  # index of the row group in its file
ROWS = 2
BYTES = 3  # before compression
CHECKSUM = 4  # of its entry in the footer; it changes with the contents


class RowGroupIndex(TypedDict):
    """How to read streamed data: the arguments of `ParquetRows` besides the row groups."""

    shards: list[str]  # paths or URLs of the parquet files
    classes: list[str | int | float | None]  # the value of each class in the label column
    columns: list[str]  # the columns to read; the label column comes last
