"""Parquet files of any size as samples: row groups are read where a batch needs them, not kept."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from common.data.order import Blocks
from common.data.sources import DataSource
from common.data.tables import ROLES, find_classes, find_label_column
from common.errors import UserError
from common.files import reading

HELD_BYTES = 2**29  # of row groups, by each process that reads
LOOKED_AT = 64  # row groups that stand for all where something is to be known before training
THREADS = 16  # that read footers, for whose bytes the Hub lets one wait
SHARE_HELD_OUT = 0.1  # of train, where there is nothing else to evaluate on


@dataclass
class Index:
    """What the files' footers say, but for what `groups` does: it is kept apart, as arrays."""

    shards: list[str]  # paths or addresses
    label_column: str
    classes: list[Any]  # the labels' values, in order
    class_names: list[str]
    notes: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)  # that are read, besides the label's

    def facts(self, groups: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return what the data set says of itself, and this."""
        told = {"class_names": self.class_names, "notes": self.notes, "splits": list(groups)}
        return told | {"index": asdict(self)}


class ParquetRows:
    """The rows of one split by number, of which a few row groups are in memory at a time."""

    def __init__(self, index: Index, groups: np.ndarray) -> None:
        """`groups`: int64 [row groups, 5], each the shard, place in it, rows, bytes, checksum."""
        self.index, self.groups = index, np.asarray(groups)
        self.ends = self.groups[:, 2].cumsum()
        self.held: dict[int, Any] = {}  # tables by row group, the one that was used last at the end
        self.numbers = {value: number for number, value in enumerate(index.classes)}
        at_once = HELD_BYTES // max(1, int(self.groups[:, 3].mean()))
        self.blocks = Blocks(self.groups[:, 2], max(1, at_once))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, samples: torch.Tensor, epoch: int | None) -> tuple[list[list[Any]], np.ndarray]:
        """Return rows of `index.columns`, and their labels' numbers: int64 [batch]."""
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
                shard = self.index.shards[self.groups[block, 0]]
                lacks = "a label of its classes" if None not in row else "a value in each column"
                raise UserError(f"{shard} has a row without {lacks}: leave it out to stream them")
            rows.append(row)
            labels.append(self.numbers[label])
        return rows, np.array(labels)

    def table(self, block: int) -> Any:
        if (table := self.held.pop(block, None)) is None:
            shard, place, *_, checksum = self.groups[block].tolist()
            columns = [*self.index.columns, self.index.label_column]
            with opened(self.index.shards[shard]) as file:
                if place >= file.num_row_groups or group_facts(file, place)[-1] != checksum:
                    raise ValueError("it has changed since the run began")
                table = file.read_row_group(place, columns=columns).select(columns)
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


def read_index(source: DataSource, label_column: str | None) -> tuple[Any, Index, dict[str, Any]]:
    """Return an empty table like the train split, what its files are, and row groups by split."""
    import datasets

    what = f"data set {source.location}"
    with reading(what):
        builder = datasets.load_dataset_builder(source.location, source.configuration)
        files = {str(name): [*map(str, found)] for name, found in builder.config.data_files.items()}
    if builder.name != "parquet":
        advice = "leave the flag out, or write them with Dataset.to_parquet"
        raise UserError(f"--streaming reads parquet files, and {what} has {builder.name}: {advice}")
    train, groups, notes = "train" if "train" in files else next(iter(files)), {}, list[str]()
    shards, like, empty = list[str](), dict[str, Any](), None
    with ThreadPoolExecutor(THREADS) as pool:
        for name in sorted(files, key=lambda name: name != train):
            role = "train" if name == train else ROLES.get(name)
            if role is None or role in groups:
                continue
            rows = list[list[int]]()
            for path, (features, found) in zip(
                files[name], pool.map(footer, files[name]), strict=True
            ):
                like = like or features
                if features != like:
                    raise UserError(f"{path} has other columns than {shards[0]}: make them alike")
                rows += [[len(shards), *row] for row in found if row[1]]
                shards.append(path)
            if not rows:
                raise UserError(f"{what}: split {name} is empty: remove or fill it")
            if empty is None:
                nothing: dict[str, list[Any]] = {column: [] for column in like}
                empty = datasets.Dataset.from_dict(nothing, features=datasets.Features(like))
                label = find_label_column(empty, label_column, source.name)
            if not labels_of(shards[rows[0][0]], label, rows[0][1]) <= {None, "", -1}:
                groups[role] = np.array(rows)
        feature, classes = like[label], list[Any]()
        if isinstance(feature, datasets.ClassLabel):
            classes, names = list(range(feature.num_classes)), list(feature.names)
        else:
            values = set().union(*pool.map(lambda path: labels_of(path, label), shards))
            classes = find_classes(values - {None, ""}, f"{what}: column {label}")
            names = [str(int(v) if isinstance(v, float) else v) for v in classes]
    if "train" not in groups or len(classes) < 2:
        raise UserError(f"{what}: train has no rows of two classes: classification needs them")
    share = source.validation_share or (SHARE_HELD_OUT if len(groups) == 1 else None)
    if share is not None and "validation" not in groups:
        all_rows = groups["train"]
        count = max(1, round(share * len(all_rows)))
        if count >= len(all_rows):
            advice = "add a validation split, or write files of more row groups"
            raise UserError(f"{what} has {len(all_rows)} row groups, too few to hold out: {advice}")
        held = ((np.arange(count) + 0.5) * len(all_rows) / count).astype(int)
        groups |= {"train": np.delete(all_rows, held, axis=0), "validation": all_rows[held]}
        notes.append(f"held out {count:,} of {len(all_rows):,} row groups of train for validation")
    return empty, Index(shards, label, classes, names, notes), groups


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


def labels_of(path: str, column: str, group: int | None = None) -> set[Any]:
    """Return the values of a column, of one row group or all."""
    with opened(path) as file:
        groups = range(file.num_row_groups) if group is None else [group]
        return {*file.read_row_groups([*groups], columns=[column])[column].unique().to_pylist()}


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open a local file, or one of the Hub: what fails there may go well at another time."""
    import fsspec
    import pyarrow.parquet as parquet

    try:
        with fsspec.open(path) as raw, parquet.ParquetFile(raw, pre_buffer=True) as file:
            yield file
    except Exception as problem:
        found = f"{type(problem).__name__}: {problem!s:.300}"
        raise UserError(f"{path} can't be read ({found})", resumable="://" in path) from None
