"""Opens parquet files, local ones or those of the Hub, and reads their footers."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from common.data.labelled_data.guess import Feature
from common.data.labelled_data.labels import LabelValue
from common.failures.sentences import reading

if TYPE_CHECKING:
    import pyarrow.parquet


class Footer(NamedTuple):
    """The parts of a parquet file's footer that are used here."""

    features: dict[str, Feature]  # the type of each column
    groups: list[list[int]]  # place, rows, bytes and checksum of each row group


def read_footer(path: str) -> Footer:
    """Read the columns and row groups of a parquet file from its footer, without reading rows.

    Raises:
        UserError: the file can't be read.
    """
    from datasets import Features

    with opened_parquet(path) as file:
        groups = [[place, *describe_group(file, place)] for place in range(file.num_row_groups)]
        return Footer(dict(Features.from_arrow_schema(file.schema_arrow)), groups)


def describe_group(file: "pyarrow.parquet.ParquetFile", place: int) -> tuple[int, int, int]:
    """Return a row group's number of rows, its bytes, and a checksum of its entry in the footer.

    The checksum changes with the contents of the row group, because the entry has statistics and
    offsets. So a changed file is noticed without reading its rows.

    Args:
        place: the index of the row group in its file.
    """
    metadata = file.metadata.row_group(place)
    checksum = zlib.crc32(str(metadata.to_dict()).encode())
    return metadata.num_rows, metadata.total_byte_size, checksum


def has_group(file: "pyarrow.parquet.ParquetFile", place: int, checksum: int) -> bool:
    """Whether a file still has a row group at this place, with this checksum.

    If not, the file has changed since its footer was read, so its rows may not be those that the
    run expects.
    """
    if place >= file.num_row_groups:
        return False
    _, _, current_checksum = describe_group(file, place)
    return current_checksum == checksum


def distinct_values(path: str, column: str) -> set[LabelValue]:
    """Return the distinct values of a column of a parquet file, such as the labels in it."""
    with opened_parquet(path) as file:
        return set(file.read(columns=[column])[column].unique().to_pylist())


def is_on_hub(path: str) -> bool:
    """Whether a path is an address on the Hub, and not that of a local file."""
    return "://" in path


@contextmanager
def opened_parquet(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Open a local parquet file, or one on the Hub, for the `with` block.

    Raises:
        UserError: the file can't be opened, or the block raises any error: see `reading`. Only a
            `UserError` of the block is raised as it is. For a file on the Hub, the error is marked
            as resumable, because another attempt may succeed.
    """
    import fsspec
    import pyarrow.parquet as parquet

    is_remote = is_on_hub(path)
    advice = "check the connection" if is_remote else "copy the file again from where it came"
    with (
        reading(path, f"{advice}, and start the run again", resumable=is_remote),
        fsspec.open(path) as raw,
        parquet.ParquetFile(raw, pre_buffer=True) as file,
    ):
        yield file
