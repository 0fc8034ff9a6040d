"""Parquet files of any size as samples: row groups are read where a batch needs them, not kept."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.builders import open_builder
from common.data.cache import write_array
from common.data.labels import Labelled, roles_of
from common.data.order import Blocks
from common.data.sources import DataSource
from common.errors import UserError
from common.files import reading

HELD_BYTES = 2**29  # of row groups, by each process that reads
LOOKED_AT = 64  # row groups that stand for all where something is to be known before training
THREADS = 16  # that read footers, for whose bytes the Hub lets one wait


class ParquetRows:
    """The rows of one split by number, of which a few row groups are in memory at a time."""

    def __init__(
        self, groups: np.ndarray, shards: list[str], columns: list[str], classes: list[Any]
    ) -> None:
        """Take the files and which columns to read, the labels', whose values are `classes`, last.

        `groups`: int64 [row groups, 5], each the shard, place in it, rows, bytes, checksum.
        """
        self.groups, self.shards, self.columns = np.asarray(groups), shards, columns
        self.ends = self.groups[:, 2].cumsum()
        self.held: dict[int, Any] = {}  # tables by row group, the one that was used last at the end
        self.numbers = {value: number for number, value in enumerate(classes)}
        at_once = HELD_BYTES // max(1, int(self.groups[:, 3].mean()))
        self.blocks = Blocks(self.groups[:, 2], max(1, at_once))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, samples: torch.Tensor, epoch: int | None) -> tuple[list[list[Any]], np.ndarray]:
        """Return rows of all columns but the last, and their labels' numbers: int64 [batch]."""
        numbers = samples.numpy()
        blocks = np.searchsorted(self.ends, numbers, side="right")
        places = (numbers - self.ends[blocks] + self.groups[blocks, 2]).tolist()
        tables = {block: self.table(block) for block in dict.fromkeys(blocks.tolist())}
        while len(self.held) > (1 if epoch is None else self.blocks.at_once):
            del self.held[next(iter(self.held))]
        rows, labels = list[list[Any]](), list[Any]()
        for block, place in zip(blocks.tolist(), places, strict=True):
            *row, label = (column[place].as_py() for column in tables[block].columns)
            if None in row or label not in self.numbers:
                shard = self.shards[self.groups[block, 0]]
                lacks = "a label of its classes" if None not in row else "a value in each column"
                raise UserError(f"{shard} has a row without {lacks}: leave it out to stream them")
            rows.append(row)
            labels.append(self.numbers[label])
        return rows, np.array(labels)

    def table(self, block: int) -> Any:
        if (table := self.held.pop(block, None)) is None:
            shard, place, *_, checksum = self.groups[block].tolist()
            with opened(self.shards[shard]) as file:
                if place >= file.num_row_groups or group_facts(file, place)[-1] != checksum:
                    raise ValueError("it has changed since the run began")
                table = file.read_row_group(place, columns=self.columns).select(self.columns)
        self.held[block] = table
        return table

    def look(self, count: int) -> list[list[Any]]:
        """Return some `count` rows, from row groups at even distances."""
        chosen = np.unique(np.linspace(0, len(self.groups) - 1, LOOKED_AT).astype(int))
        each = -(-count // len(chosen))
        starts, rows = self.ends - self.groups[:, 2], list[list[Any]]()
        for block in chosen.tolist():
            numbers = torch.arange(starts[block], min(starts[block] + each, self.ends[block]))
            rows += self.read(numbers, None)[0]
        return rows


class ParquetTables(Labelled):
    """Labelled splits of a data set as row groups of parquet files, whose footers are read."""

    def __init__(self, source: DataSource, label_column: str | None) -> None:
        what = f"data set {source.location}"
        opened_builder = open_builder(source)
        builder = opened_builder.builder
        with reading(what):
            files = {str(name): [*map(str, f)] for name, f in builder.config.data_files.items()}
        if builder.name != "parquet":
            found = f"--streaming reads parquet files, and {what} has {builder.name}"
            raise UserError(f"{found}: leave the flag out, or write them with Dataset.to_parquet")
        self.splits, self.shards = dict[str, np.ndarray](), list[str]()
        roles = roles_of(files, source)
        self.evaluated = roles[0][1] if source.is_whole else None
        first = roles[0][0]
        with ThreadPoolExecutor(THREADS) as pool:
            paths = [path for _, name in roles for path in files[name]]
            footers = dict(zip(paths, pool.map(footer, paths), strict=True))
            super().__init__(source.name, footers[paths[0]][0], label_column)
            self.notes += opened_builder.notes
            read = partial(values_of, column=self.label)
            for role, name in roles:
                if role in self.splits:
                    continue
                rows = list[list[int]]()
                for path in files[name]:
                    features, groups = footers[path]
                    if features != self.features:
                        odd = f"{path} has other columns than {paths[0]}"
                        raise UserError(f"{odd}: make them alike")
                    rows += [[len(self.shards), *group] for group in groups if group[1]]
                    self.shards.append(path)
                if not rows:
                    raise UserError(f"{what}: split {name} is empty: remove or fill it")
                if not read(self.shards[rows[0][0]]) <= self.unlabelled:
                    self.splits[role] = np.array(rows)
            self.find_classes(() if self.is_typed else chain(*pool.map(read, self.shards)))
        if first not in self.splits or (len(self.classes) < 2 and not source.is_whole):
            raise UserError(
                f"{what}: {first} has no rows of two classes: classification needs them"
            )
        self.first = first
        if source.is_whole:
            return
        train = self.splits["train"]
        held = self.hold_out(source, len(train), np.arange(len(train)), "row groups")
        if len(held):
            self.splits |= {"train": np.delete(train, held, axis=0), "validation": train[held]}

    def keep(self, folder: Path, columns: list[str]) -> ParquetRows:
        """Write where the row groups of all splits are, and return the training rows."""
        for name, groups in self.splits.items():
            write_array(folder / f"{name}_groups.npy", [groups], len(groups))
        self.index = {"shards": self.shards, "classes": self.classes}
        self.index["columns"] = [*columns, self.label]
        return ParquetRows(self.splits[self.first], **self.index)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"index": self.index}


def footer(path: str) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a file's features, and of each row group its place, rows, bytes and a checksum."""
    from datasets import Features

    with opened(path) as file:
        rows = [[place, *group_facts(file, place)] for place in range(file.num_row_groups)]
        return dict(Features.from_arrow_schema(file.schema_arrow)), rows


def group_facts(file: Any, place: int) -> tuple[int, int, int]:
    """Return a row group's rows, bytes and a checksum of what the footer says of it."""
    found = file.metadata.row_group(place)
    return found.num_rows, found.total_byte_size, zlib.crc32(str(found.to_dict()).encode())


def values_of(path: str, column: str) -> set[Any]:
    with opened(path) as file:
        return {*file.read(columns=[column])[column].unique().to_pylist()}


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open a local file, or one of the Hub: what fails there may go well at another time."""
    import fsspec
    import pyarrow.parquet as parquet

    try:
        with fsspec.open(path) as raw, parquet.ParquetFile(raw, pre_buffer=True) as file:
            yield file
    except Exception as problem:
        found = f"{type(problem).__name__}: {' '.join(str(problem).split()):.300}"
        raise UserError(f"{path} can't be read ({found})", resumable="://" in path) from None
