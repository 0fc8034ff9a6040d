"""Labelled data sets in parquet files that are read while a run trains, for `--streaming`."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.labelled_data.columns import is_text
from common.data.labelled_data.guess import Feature
from common.data.labelled_data.labels import LabelledData, LabelValue, is_missing_label
from common.data.labelled_data.split_roles import choose_splits
from common.data.mistakes import (
    empty_split_error,
    no_values_error,
    other_columns_error,
    single_class_error,
)
from common.data.prepared_data.cache import PreparedFacts, write_array
from common.data.prepared_data.row_groups import SHARD, RowGroupIndex
from common.data.reading.builders import advice_on_files, open_builder
from common.data.sources import DataSource
from common.data.streaming.parquet_files import Footer, distinct_values, read_footer
from common.data.streaming.parquet_rows import ParquetRows
from common.errors import UserError
from common.failures.sentences import reading

if TYPE_CHECKING:
    from datasets import DatasetBuilder

FOOTER_THREADS = 16  # threads that read footers; the Hub takes long to answer each request


class ParquetTables(LabelledData):
    """The labelled splits of a data set as row groups of parquet files.

    Only the footers and the label column are read here. `ParquetRows` reads the rows later.
    """

    splits: dict[str, np.ndarray]  # by role: int64 [row groups, 5], as `ParquetRows` takes them
    # The type of each column in the files. In `columns`, README.md may give a column classes.
    file_features: dict[str, Feature]

    def __init__(self, source: DataSource, label_column: str | None) -> None:
        """Read the footers, find the classes, and hold some row groups out if that is needed.

        Splits without labels are left out.

        Raises:
            UserError: the data are not parquet files, or can't be used for classification.
        """
        self.where = f"data set {source.location}"
        opened_builder = open_builder(source)
        files = self.files_by_split(opened_builder.builder, advice_on_files(source.location))
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

    def files_by_split(self, builder: "DatasetBuilder", advice: str) -> dict[str, list[str]]:
        """Return the files of each split; raise a `UserError` unless they are parquet files.

        Args:
            advice: what to do if the files can't be listed.
        """
        with reading(self.where, advice):
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
        """Return the value of each class in the files, if the label column has the type ClassLabel.

        It is the class's name if the files hold text, and otherwise its number.
        """
        if is_text(self.file_features[self.label_column]):
            # The files have the names of the classes that README.md lists, and not their numbers.
            return list(self.class_names)
        return super().values_of_classes()

    def make_validation(self, source: DataSource) -> None:
        """Move some row groups of train to a validation split, if the data set needs one.

        A split consists of whole row groups here, so single rows can't be moved.

        Raises:
            UserError: nothing could be evaluated, or train has too few row groups.
        """
        train = self.splits["train"]
        held_out = self.choose_held_out(source, len(train), np.arange(len(train)), "row groups")
        if len(held_out):
            self.splits["train"] = np.delete(train, held_out, axis=0)
            self.splits["validation"] = train[held_out]

    def write_groups(self, folder: Path, columns: list[str]) -> ParquetRows:
        """Write the places of the row groups to a cache folder, and set `index` for `facts`.

        No rows are written: a run reads them from the parquet files while it trains.

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
        """Return the facts that the cache keeps; the index among them tells a run how to read rows.

        The index is missing before `write_groups`.
        """
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
