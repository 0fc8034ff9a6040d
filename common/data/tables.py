"""Read the tables of a labelled data set: its splits, and the labels' numbers.

`datasets` is imported where something is read: a start on cached data never does.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.data.labels import Labelled, roles_of
from common.data.sources import BUILT_IN, DataSource, listing
from common.errors import UserError
from common.files import reading

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


class Tables(Labelled):
    """Labelled splits of a data set as `datasets.Dataset`s."""

    def __init__(self, source: DataSource, label_column: str | None) -> None:
        """Read all splits; rows without a label, and splits of such, are left out."""
        from datasets import Image

        (dataset, notes), where = load_splits(source), f"data set {source.name}: "
        roles = [*roles_of(dataset)]
        features = dataset[roles[0][1]].features
        if {*map(type, features.values())} == {Image}:
            advice = "; ".join(["put each class into a folder of its name, side by side", *notes])
            raise UserError(f"{where}its images have no labels: {advice}")
        super().__init__(source.name, features, label_column)
        self.notes += notes
        self.splits: dict[str, Dataset] = {}
        self.labels: dict[str, np.ndarray] = {}  # by split: [rows], values, int64 at last
        for role, name in roles:
            if role in self.splits or self.label not in dataset[name].column_names:
                continue
            values = dataset[name][self.label][:]
            self.splits[role], self.labels[role] = dataset[name], np.array(values, dtype=object)
            labelled = (v not in self.unlabelled and v == v for v in values)
            self.keep(role, [row for row, has_label in enumerate(labelled) if has_label], "label")
        self.find_classes(chain(*self.labels.values()))
        numbers = {value: number for number, value in enumerate(self.classes)}
        for role, labels in self.labels.items():
            if unknown := {*labels} - numbers.keys():
                odd = f"{where}column {self.label} of {role} holds {min(unknown)}"
                raise UserError(f"{odd}, and its classes are numbered from 0 to {len(numbers) - 1}")
            self.labels[role] = np.array([numbers[value] for value in labels])
        if unseen := sorted({*numbers.values()} - {*self.labels["train"]}):
            named = ", ".join(self.class_names[number] for number in unseen)
            self.notes.append(f"train has no row of {len(unseen)} classes: {named:.60}")
        if len({*self.labels["train"]}) < 2:
            raise UserError(f"{where}all rows of train have one label: classification needs two")
        self.make_validation(source)
        # What always guessing the most frequent class would reach: the least to beat.
        majority = np.bincount(self.labels["train"]).argmax()
        evaluated = "test" if "test" in self.labels else "validation"
        reached = f"{(self.labels[evaluated] == majority).mean():.1%} of {evaluated}"
        self.notes.append(f"always guessing {self.class_names[majority]}: {reached}")

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    def keep(self, split: str, rows: Sequence[int], what: str) -> None:
        """Leave out all other rows of a split, which have no `what`, or all of it, but of train."""
        total = len(self.splits[split])
        if not rows and split == "train":
            advice = "check the data, or name another column"
            raise UserError(f"data set {self.name}: no row of train has a {what}: {advice}")
        if lost := total - len(rows):
            self.notes.append(f"{split}: {lost:,} of {total:,} rows have no {what}")
            self.splits[split] = self.splits[split].select(rows)
            self.labels[split] = self.labels[split][rows]
        if not rows:
            del self.splits[split], self.labels[split]

    def make_validation(self, source: DataSource) -> None:
        """Hold a deterministic share of train out where there is need, of each class."""
        train, labels = self.splits["train"], self.labels["train"]
        order = np.random.default_rng(0).permutation(len(labels))
        # The only row of a class is one to learn from.
        several = order[np.bincount(labels)[labels[order]] > 1]
        by_class = several[labels[several].argsort(kind="stable")] if len(several) else order
        is_held = np.isin(np.arange(len(labels)), self.hold_out(source, len(labels), by_class))
        for split, chosen in (("train", ~is_held), ("validation", is_held)):
            if is_held.any():
                self.splits[split] = train.select(np.flatnonzero(chosen))
                self.labels[split] = labels[chosen]


def load_splits(source: DataSource) -> tuple["DatasetDict", list[str]]:
    """Return the splits, and what is to be said of them."""
    import datasets
    import huggingface_hub
    from datasets.packaged_modules.csv.csv import CsvConfig

    if source.location in BUILT_IN:
        from common.data import built_in

        return built_in.LOADERS[source.location](), []
    datasets.disable_progress_bars()
    for library in (datasets, huggingface_hub):  # what fails is said below
        library.logging.set_verbosity(datasets.logging.CRITICAL)
    place, what = (source.location, source.configuration), f"data set {source.location}"
    with reading(what):
        builder = datasets.load_dataset_builder(*place)
        # A class or a text that reads NA, null or None is one: an empty cell alone has no value.
        is_csv = isinstance(builder.config, CsvConfig)
        options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]} if is_csv else {}
        try:
            loaded = datasets.load_dataset(*place, **options)
        except Exception:
            blame_file(builder, options, what)
            raise
    for name, split in loaded.items():
        if not len(split):
            raise UserError(f"{what}: split {name} is empty: remove or fill it")
    return loaded, unread(builder, source.location)


def unread(builder: Any, folder: str) -> list[str]:
    """Say which of a local folder's files are like those that are read, and in no split.

    A `UserError`: one is in two of them, as by a class that is called test.
    """
    if not os.path.isdir(folder):
        return []
    read = Counter(str(file) for files in builder.config.data_files.values() for file in files)
    if twice := next((file for file, count in read.items() if count > 1), None):
        advice = "rename its folder or it"
        raise UserError(f"data set {folder}: {twice} is in two splits by its path: {advice}")
    kinds = {Path(file).suffix for file in read}
    left = [os.path.relpath(file, folder) for file, *_ in listing(Path(folder)) if file not in read]
    shown = [n for n in left if Path(n).suffix in kinds and not re.search(r"(^|/)(\.|__[Mp])", n)]
    return [f"{len(shown):,} files are in no split and not read, as {shown[0]!r}"] if shown else []


def blame_file(builder: Any, options: dict[str, Any], what: str) -> None:
    """Raise a `UserError` for the first local table that can't be read, or not with the others."""
    import datasets

    first: dict[str, Any] | None = None
    is_table = builder.name in ("csv", "json", "parquet")
    for file in chain(*builder.config.data_files.values()) if is_table else ():
        with tempfile.TemporaryDirectory() as folder, reading(f"{what}: its file {file}"):
            given = {"data_files": [file], "split": "train", "cache_dir": folder, **options}
            try:
                features = datasets.load_dataset(builder.name, **given).features
            except ValueError as problem:
                if "corresponds to no data" in str(problem):
                    raise ValueError("it has no rows: remove or fill it") from None
                raise
        first = first or features
        odd = [name for name in {**first, **features} if first.get(name) != features.get(name)]
        if odd:
            columns = f"in the columns {', '.join(odd)} than others"
            raise UserError(f"{what}: its file {file} has other names or types {columns}")
