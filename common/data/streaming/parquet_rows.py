"""Reads rows of parquet files of any size while a run trains, for `--streaming`.

A row group is read when a batch needs it. Only a few row groups are in memory at a time.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.data.labelled_data.labels import LabelValue, is_missing_label
from common.data.mistakes import CORRECT_LABEL
from common.data.order import Blocks
from common.data.prepared_data.row_groups import BYTES, CHECKSUM, PLACE, ROWS, SHARD
from common.data.streaming.parquet_files import has_group, is_on_hub, opened_parquet
from common.errors import UserError
from common.system.wording import counted

if TYPE_CHECKING:
    import pyarrow

# The values of a row, of the types that its columns have: texts, numbers, or dicts with the bytes
# of an image. Only the data set knows which.
RowValues = list[Any]

CACHE_BYTES = 2**29  # bytes of row groups that each reading process keeps in memory, roughly
SAMPLED_GROUPS = 64  # row groups from which a sample of rows is taken before training


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
        self.cached_tables: dict[int, pyarrow.Table] = {}
        self.class_numbers = {label: number for number, label in enumerate(classes)}
        mean_bytes = int(self.groups[:, BYTES].mean())
        at_once = CACHE_BYTES // max(1, mean_bytes)
        # The blocks of samples, by which loaders order their batches, are the row groups.
        self.blocks = Blocks(self.groups[:, ROWS], max(1, at_once))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: torch.Tensor, epoch: int | None) -> tuple[list[RowValues], np.ndarray]:
        """Read the rows of a batch.

        The row groups that were used most recently stay in memory for the next batches.

        Args:
            indices: those of the rows, int64 [batch].
            epoch: None in an evaluation. An evaluation needs each row group once, one after the
                other, so only the last one stays in memory.

        Returns:
            The values of each row in all columns but the last, and the class numbers, int64
            [batch].

        Raises:
            UserError: a row lacks a value or has an unknown label, or a file can't be read.
        """
        rows_to_read = indices.numpy()
        blocks = np.searchsorted(self.ends, rows_to_read, side="right")
        positions = rows_to_read - self.starts[blocks]  # of each row in its row group
        tables = {block: self.table(block) for block in dict.fromkeys(blocks.tolist())}
        most_tables = 1 if epoch is None else self.blocks.at_once
        # The method `table` has put them into `cached_tables`, the most recently used one last.
        while len(self.cached_tables) > most_tables:
            least_recently_used = next(iter(self.cached_tables))
            del self.cached_tables[least_recently_used]
        rows: list[RowValues] = []
        labels: list[int] = []
        for block, position in zip(blocks.tolist(), positions.tolist(), strict=True):
            *row, label = (column[position].as_py() for column in tables[block].columns)
            if None in row or label not in self.class_numbers:
                raise self.unsuitable_row_error(self.shards[self.groups[block, SHARD]], row, label)
            rows.append(row)
            labels.append(self.class_numbers[label])
        return rows, np.array(labels)

    def unsuitable_row_error(self, shard: str, row: RowValues, label: LabelValue) -> UserError:
        """Return the error for a row that lacks a value, or whose label is not a known class.

        Args:
            shard: the file of the row.
            row: the values of all columns but the last.
            label: the value of the last column.
        """
        label_column = self.columns[-1]
        lacking = None
        if None in row:
            lacking = f"value in column {self.columns[row.index(None)]}"
        # In a column of plain values, every label is a class. So a label that is not a class
        # belongs to a column of type ClassLabel, where -1 stands for a missing label.
        elif is_missing_label(label, is_typed=True):
            lacking = f"label (a -1 or NaN counts as none) in column {label_column}"
        if lacking is not None:
            return UserError(
                f"{shard} contains a row without a {lacking}",
                advice=(
                    "remove such rows, or pass --no-streaming, which skips them; either way, "
                    "start another run"
                ),
            )
        return UserError(
            f"{shard} contains a row with the label {label!r:.60} in column {label_column}, "
            f"which is none of the {counted(len(self.class_numbers), 'class', 'classes')}",
            advice=f"{CORRECT_LABEL}, and start another run",
        )

    def table(self, block: int) -> "pyarrow.Table":
        """Return a row group, from memory if it is there, and keep it as the last one used.

        The label column is the last column of the table.

        Raises:
            UserError: the group's file can't be read, or has changed since the run began.
        """
        table = self.cached_tables.pop(block, None)
        if table is None:
            group = self.groups[block].tolist()
            place = group[PLACE]
            path = self.shards[group[SHARD]]
            with opened_parquet(path) as file:
                if not has_group(file, place, group[CHECKSUM]):
                    raise changed_file_error(path)
                # `read_row_group` keeps the order of the file; `select` puts the label column last.
                table = file.read_row_group(place, columns=self.columns).select(self.columns)
        self.cached_tables[block] = table
        return table

    def sample(self, count: int) -> list[RowValues]:
        """Return about `count` rows without their labels, from row groups at even distances.

        A vocabulary, or the size and scaling of images, comes from them before training begins.
        There are fewer rows if the row groups are small.

        Raises:
            UserError: see `read`.
        """
        last_group = len(self.groups) - 1
        blocks = np.unique(np.linspace(0, last_group, SAMPLED_GROUPS).astype(int))
        rows_per_block = -(-count // len(blocks))
        rows: list[RowValues] = []
        for block in blocks.tolist():
            start = self.starts[block]
            end = min(start + rows_per_block, self.ends[block])
            block_rows, _ = self.read(torch.arange(start, end), None)
            rows += block_rows
        return rows


def changed_file_error(path: str) -> UserError:
    """Return the error for a file that another one has replaced while the run reads it."""
    problem = f"{path} has changed since the run began"
    if is_on_hub(path):  # the user can't restore this file, and another reading may succeed
        advice = "start the run again; if this fails, too, start another run"
        return UserError(problem, advice=advice, resumable=True)
    advice = "restore this file as it was, and start the run again; or start another run"
    return UserError(problem, advice=advice)
