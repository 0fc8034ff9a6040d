"""Parquet files of any size as samples, for `--streaming`.

A row group is read when a batch needs it. Only a few row groups are in memory at a time.
"""

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.data.builders import DATA_ADVICE, open_builder
from common.data.cache import PreparedFacts, RowGroupIndex, write_array
from common.data.guess import Feature
from common.data.labels import LabelledData, LabelValue, choose_splits, is_missing_label, is_text
from common.data.mistakes import (
    CORRECT_LABEL,
    empty_split_error,
    no_values_error,
    other_columns_error,
    single_class_error,
)
from common.data.order import Blocks
from common.data.sources import DataSource
from common.errors import UserError
from common.failures.sentences import reading
from common.system.wording import counted

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet
    from datasets import DatasetBuilder

# The values of a row, of the types that its columns have: texts, numbers, or dicts with the bytes
# of an image. Only the data set knows which.
RowValues = list[Any]

HELD_BYTES = 2**29  # bytes of row groups that each reading process keeps in memory, roughly
SAMPLED_GROUPS = 64  # row groups from which a sample of rows is taken before training
FOOTER_THREADS = 16  # threads that read footers; the Hub takes long to answer each request

# Columns of the array that describes the row groups of a split: int64 [row groups, 5].
SHARD = 0  # index into the list of files
PLACE = 1  # index of the row group in its file
ROWS = 2
BYTES = 3  # before compression
CHECKSUM = 4  # from `describe_group`


class ParquetRows:
    """The rows of one split by index; a few row groups are in memory at a time.

    A row group is a block of `common.data.order`. A block's number is its index in `groups`.
    """

    def __init__(
        self, groups: np.ndarray, shards: list[str], columns: list[str], classes: list[LabelValue]
    ) -> None:
        """Prepare to read; no file is opened yet.

        Args:
            groups: int64 [row groups, 5]: shard, place in it, rows, bytes, checksum.
            shards: paths or URLs of the files.
            columns: the columns to read; the label column comes last.
            classes: the value of each class in the label column.
        """
        self.groups = np.asarray(groups)
        self.shards = shards
        self.columns = columns
        self.ends = self.groups[:, ROWS].cumsum()  # the first row after each row group
        self.starts = self.ends - self.groups[:, ROWS]  # the first row of each row group
        # Tables in memory, by the number of their row group. The last one was used most recently.
        self.held: dict[int, pyarrow.Table] = {}
        self.class_numbers = {label: number for number, label in enumerate(classes)}
        mean_bytes = int(self.groups[:, BYTES].mean())
        at_once = HELD_BYTES // max(1, mean_bytes)
        # The blocks of samples, by which loaders order their batches, are the row groups.
        self.blocks = Blocks(self.groups[:, ROWS], max(1, at_once))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, samples: torch.Tensor, epoch: int | None) -> tuple[list[RowValues], np.ndarray]:
        """Read some rows.

        Args:
            samples: int64 [batch], row indices.
            epoch: None in an evaluation. An evaluation needs each row group once, one after the
                other, so only the last one stays in memory.

        Returns:
            The values of each row in all columns but the last, and the class numbers, int64
            [batch].

        Raises:
            UserError: a row lacks a value or has an unknown label, or a file can't be read.
        """
        rows_to_read = samples.numpy()
        blocks = np.searchsorted(self.ends, rows_to_read, side="right")
        positions = rows_to_read - self.starts[blocks]  # of each row in its row group
        tables = {block: self.table(block) for block in dict.fromkeys(blocks.tolist())}
        at_most = 1 if epoch is None else self.blocks.at_once
        # `table` has put the row groups into `held`, the one that was used most recently last.
        while len(self.held) > at_most:
            least_recently_used = next(iter(self.held))
            del self.held[least_recently_used]
        rows: list[RowValues] = []
        labels: list[int] = []
        for block, position in zip(blocks.tolist(), positions.tolist(), strict=True):
            *row, label = (column[position].as_py() for column in tables[block].columns)
            if None in row or label not in self.class_numbers:
                raise self.unfit_row_error(self.shards[self.groups[block, SHARD]], row, label)
            rows.append(row)
            labels.append(self.class_numbers[label])
        return rows, np.array(labels)

    def unfit_row_error(self, shard: str, row: RowValues, label: LabelValue) -> UserError:
        """Return the error for a row that lacks a value, or whose label is not a known class.

        Args:
            shard: the file of the row.
            row: the values of all columns but the last.
            label: the value of the last column.
        """
        label_column = self.columns[-1]
        # All values in a column of plain values are classes. So only in a column of type ClassLabel
        # can -1 be none of the classes.
        if None not in row and not is_missing_label(label, is_typed=True):
            return UserError(
                f"{shard} contains a row with the label {label!r:.60} in column {label_column}, "
                f"which is none of the {counted(len(self.class_numbers), 'class', 'classes')}",
                advice=f"{CORRECT_LABEL}, and start another run",
            )
        column = self.columns[row.index(None)] if None in row else label_column
        value = "value" if None in row else "label (a -1 or NaN counts as none)"
        return UserError(
            f"{shard} contains a row without a {value} in column {column}",
            advice=(
                "remove such rows, or pass --no-streaming, which skips them; either way, start "
                "another run"
            ),
        )

    def table(self, block: int) -> "pyarrow.Table":
        """Return a row group, from memory if it is there, and keep it as the last one used.

        The label column is the last column of the table.

        Raises:
            UserError: the group's file can't be read, or has changed since the run began.
        """
        table = self.held.pop(block, None)
        if table is None:
            group = self.groups[block].tolist()
            place = group[PLACE]
            path = self.shards[group[SHARD]]
            with opened_parquet(path) as file:
                if not has_group(file, place, group[CHECKSUM]):
                    raise changed_file_error(path)
                # `read_row_group` keeps the order of the file; `select` puts the label column last.
                table = file.read_row_group(place, columns=self.columns).select(self.columns)
        self.held[block] = table
        return table

    def sample(self, count: int) -> list[RowValues]:
        """Return about `count` rows without their labels, from row groups at even distances.

        There are fewer rows if the row groups are small.

        Raises:
            UserError: see `read`.
        """
        last_group = len(self.groups) - 1
        blocks = np.unique(np.linspace(0, last_group, SAMPLED_GROUPS).astype(int))
        rows_per_block = -(-count // len(blocks))
        starts = self.ends - self.groups[:, ROWS]
        rows: list[RowValues] = []
        for block in blocks.tolist():
            end = min(starts[block] + rows_per_block, self.ends[block])
            block_rows, _ = self.read(torch.arange(starts[block], end), None)
            rows += block_rows
        return rows


class Footer(NamedTuple):
    """The parts of a parquet file's footer that are used here."""

    features: dict[str, Feature]  # the type of each column
    groups: list[list[int]]  # place, rows, bytes and checksum of each row group


class ParquetTables(LabelledData):
    """The labelled splits of a data set as row groups of parquet files.

    Only the footers and the label column are read here. `ParquetRows` reads the rows later.
    """

    splits: dict[str, np.ndarray]  # by role: int64 [row groups, 5], as `ParquetRows` takes them
    # The type of each column in the files. In `features`, README.md may give a column classes.
    file_features: dict[str, Feature]

    def __init__(self, source: DataSource, label_column: str | None) -> None:
        """Read the footers, find the classes, and hold some row groups out if that is needed.

        Splits without labels are left out.

        Raises:
            UserError: the data are not parquet files, or can't be used for classification.
        """
        self.where = f"data set {source.location}"
        opened_builder = open_builder(source)
        files = self.files_of(opened_builder.builder)
        self.splits = {}
        self.shards: list[str] = []
        self.index: RowGroupIndex | None = None  # None until `write_groups` sets it
        chosen_splits = choose_splits(files, source)
        self.first_role, first_name = chosen_splits[0]
        if source.is_whole:
            self.evaluated_split = first_name
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            paths = [path for _, name in chosen_splits for path in files[name]]
            footers = dict(zip(paths, pool.map(read_footer, paths), strict=True))
            self.first_file = paths[0]
            self.file_features = footers[self.first_file].features
            features = with_stated_classes(self.file_features, opened_builder.builder)
            super().__init__(source.name, features, label_column)
            self.notes += opened_builder.notes
            for role, name in chosen_splits:
                # Of several splits with the same role, the first one that has labels is read.
                if role not in self.splits:
                    self.add_split(role, name, files[name], footers)
            self.find_classes(self.labels_in_files(pool))
        if self.first_role not in self.splits:
            raise no_values_error(source.name, first_name, "label")
        if not source.is_whole:
            if len(self.classes) < 2:
                raise single_class_error(source.name, first_name)
            self.make_validation(source)

    def files_of(self, builder: "DatasetBuilder") -> dict[str, list[str]]:
        """Return the files of each split; raise a `UserError` unless they are parquet files."""
        with reading(self.where, DATA_ADVICE):
            files = {
                str(name): [str(file) for file in split_files]
                for name, split_files in builder.config.data_files.items()
            }
        if builder.name != "parquet":
            raise UserError(
                f"--streaming reads only parquet files, but {self.where} has {builder.name} files",
                advice="pass --no-streaming, or convert the files with Dataset.to_parquet",
            )
        return files

    def add_split(self, role: str, name: str, paths: list[str], footers: dict[str, Footer]) -> None:
        """Add the row groups of a split, unless its rows have no labels.

        Args:
            role: train, validation or test.
            name: the split's name in the data set.
            paths: the files of the split.
            footers: the footers of these files and perhaps others, by path.

        Raises:
            UserError: the split is empty, or a file's columns differ from the first split's.
        """
        groups: list[list[int]] = []
        for path in paths:
            footer = footers[path]
            if footer.features != self.file_features:
                raise other_columns_error(
                    path, footer.features, self.first_file, self.file_features
                )
            shard = len(self.shards)
            for place, rows, num_bytes, checksum in footer.groups:
                if rows:
                    groups.append([shard, place, rows, num_bytes, checksum])
            self.shards.append(path)
        if not groups:
            raise empty_split_error(self.name, name)
        # Some splits have no labels at all, such as GLUE's test splits. The first label that is
        # found shows that a split has some, so in most splits only one file is read here.
        shards = dict.fromkeys(group[SHARD] for group in groups)
        if any(self.has_labels(self.shards[shard]) for shard in shards):
            self.splits[role] = np.array(groups)

    def has_labels(self, path: str) -> bool:
        """Whether a row of a file has a label; a `UserError` if the file can't be read."""
        labels = distinct_values(path, self.label_column)
        return not all(is_missing_label(label, self.is_typed) for label in labels)

    def labels_in_files(self, pool: ThreadPoolExecutor) -> Iterable[LabelValue]:
        """Return the labels in all files; none if the type of the column lists the classes.

        Args:
            pool: the threads that read the files.
        """
        if self.is_typed:
            return ()
        labels_of = partial(distinct_values, column=self.label_column)
        return chain.from_iterable(pool.map(labels_of, self.shards))

    def values_of_classes(self) -> list[LabelValue]:
        if is_text(self.file_features[self.label_column]):
            # The files have the names of the classes that README.md lists, and not their numbers.
            return list(self.class_names)
        return super().values_of_classes()

    def make_validation(self, source: DataSource) -> None:
        """Move some row groups of train to a validation split, if the data set needs one.

        Raises:
            UserError: nothing could be evaluated, or train has too few row groups.
        """
        train = self.splits["train"]
        held_out = self.choose_held_out(source, len(train), np.arange(len(train)), "row groups")
        if len(held_out):
            self.splits["train"] = np.delete(train, held_out, axis=0)
            self.splits["validation"] = train[held_out]

    def write_groups(self, folder: Path, columns: list[str]) -> ParquetRows:
        """Write the row groups of all splits to a cache folder, and set `index` for `facts`.

        Args:
            columns: the columns that a batch needs, besides the label column.

        Returns:
            The rows of the first split, so that the caller can examine a sample of them.
        """
        for role, groups in self.splits.items():
            write_array(folder / f"{role}_groups.npy", [groups], len(groups))
        index: RowGroupIndex = {
            "shards": self.shards,
            "classes": self.classes,
            "columns": [*columns, self.label_column],
        }
        self.index = index
        return ParquetRows(self.splits[self.first_role], **index)

    def facts(self) -> PreparedFacts:
        facts = super().facts()
        if self.index is not None:
            facts["index"] = self.index
        return facts


def with_stated_classes(
    features: dict[str, Feature], builder: "DatasetBuilder"
) -> dict[str, Feature]:
    """Return the columns of a file, with the classes that README.md lists for some of them.

    Data that are read as a whole have these classes, too.
    """
    from datasets import ClassLabel

    stated = builder.info.features or {}
    return {
        column: stated[column] if isinstance(stated.get(column), ClassLabel) else feature
        for column, feature in features.items()
    }


def read_footer(path: str) -> Footer:
    """Read the footer of a parquet file; raise a `UserError` if it can't be read."""
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
    """Whether a file still has a row group at this place, with this checksum."""
    if place >= file.num_row_groups:
        return False
    _, _, current_checksum = describe_group(file, place)
    return current_checksum == checksum


def distinct_values(path: str, column: str) -> set[LabelValue]:
    """Return the distinct values of a column of a parquet file."""
    with opened_parquet(path) as file:
        return set(file.read(columns=[column])[column].unique().to_pylist())


def changed_file_error(path: str) -> UserError:
    """Return the error for a file that another one has replaced while the run reads it."""
    problem = f"{path} has changed since the run began"
    if is_on_hub(path):  # the user can't restore this file, and another reading may succeed
        advice = "start the run again; if this fails, too, start another run"
        return UserError(problem, advice=advice, resumable=True)
    advice = "restore this file as it was, and start the run again; or start another run"
    return UserError(problem, advice=advice)


def is_on_hub(path: str) -> bool:
    """Whether a path is an address on the Hub, and not that of a local file."""
    return "://" in path


@contextmanager
def opened_parquet(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Open a local parquet file, or one on the Hub, for the `with` block.

    Raises:
        UserError: the file can't be opened, or reading from it in the block fails. For a file on
            the Hub, the run is marked as resumable, because another attempt may succeed.
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
