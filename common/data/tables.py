"""Read a data set for classification: its splits, labels and classes.

`datasets` is imported where something is read: a start on cached data never does.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.data.sources import BUILT_IN, DataSource, listing
from common.errors import UserError
from common.files import reading

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

# How data sets call the splits that are read, and columns of labels.
ROLES = dict.fromkeys(("valid", "val", "dev", "validation_matched"), "validation")
ROLES |= {name: name for name in ("train", "validation", "test")}
LABEL_NAMES = ("label", "labels", "class", "target", "category")
# The flags of role "data" that are heeded between here and `choose_source`.
READS = frozenset({"dataset", "dataset_config", "label_column", "validation_share", "streaming"})


@dataclass
class RawData:
    """Labelled splits of a data set as `datasets.Dataset`s, and the classes' names."""

    name: str
    label_column: str
    splits: "dict[str, Dataset]" = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)  # split -> [rows], int64 at last
    class_names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    def facts(self) -> dict[str, Any]:
        names = {"class_names": self.class_names, "notes": self.notes}
        return {"splits": list(self.splits), **names}


def load_raw(source: DataSource, label_column: str | None) -> RawData:
    """Read all splits of a data set; rows without a label, and splits of such, are left out.

    Without a validation split a share of `train` is held out: what the source asks for, or else
    10 % if there is no test split either.
    """
    from datasets import ClassLabel, Image

    (dataset, notes), where = load_splits(source), f"data set {source.name}: "
    train_name = "train" if "train" in dataset else next(iter(dataset))
    if {*map(type, dataset[train_name].features.values())} == {Image}:
        advice = "; ".join(["put each class into a folder of its name, side by side", *notes])
        raise UserError(f"{where}its images have no labels: {advice}")
    label = find_label_column(dataset[train_name], label_column, source.name)
    feature = dataset[train_name].features[label]
    # As GLUE marks rows without one; where labels are mere numbers, -1 is one of them.
    unlabelled = (None, "", -1) if isinstance(feature, ClassLabel) else (None, "")
    raw = RawData(source.name, label, notes=notes)
    for name, split in dataset.items():
        role = "train" if name == train_name else ROLES.get(str(name))
        if role is None or role in raw.splits or label not in split.column_names:
            continue
        values = split[label][:]
        raw.splits[role], raw.labels[role] = split, np.array(values, dtype=object)
        raw.keep(
            role, [row for row, v in enumerate(values) if v not in unlabelled and v == v], "label"
        )
    if isinstance(feature, ClassLabel):
        classes, raw.class_names = list(range(feature.num_classes)), list(feature.names)
    else:
        classes = find_classes(set().union(*raw.labels.values()), f"{where}column {label}")
        raw.class_names = [str(int(v) if isinstance(v, float) else v) for v in classes]
    numbers = {value: index for index, value in enumerate(classes)}
    for role, values in raw.labels.items():
        if unknown := {*values} - numbers.keys():
            odd = f"{where}column {label} of {role} holds {min(unknown)}"
            raise UserError(f"{odd}, and its classes are numbered from 0 to {len(classes) - 1}")
        raw.labels[role] = np.array([numbers[value] for value in values])
    if unseen := sorted({*range(len(classes))} - {*raw.labels["train"]}):
        named = ", ".join(raw.class_names[number] for number in unseen)
        raw.notes.append(f"train has no row of {len(unseen)} classes: {named:.60}")
    if len(set(raw.labels["train"])) < 2:
        raise UserError(f"{where}all rows of train have one label: classification needs two")
    share = source.validation_share or (0.1 if len(raw.splits) == 1 else None)
    if share is not None and "validation" not in raw.splits:
        hold_out(raw, share)
    # What always guessing the most frequent class would reach: the least to beat.
    majority = np.bincount(raw.labels["train"]).argmax()
    evaluated = "test" if "test" in raw.labels else "validation"
    reached = (raw.labels[evaluated] == majority).mean()
    raw.notes.append(f"always guessing {raw.class_names[majority]}: {reached:.1%} of {evaluated}")
    return raw


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


def find_label_column(split: "Dataset", asked: str | None, name: str) -> str:
    """Return the column of the labels: named, of type ClassLabel, or called as one."""
    from datasets import ClassLabel, Value

    typed = [column for column, kind in split.features.items() if isinstance(kind, ClassLabel)]
    called = [column for column in split.column_names if column.lower() in LABEL_NAMES]
    found = typed if len(typed) == 1 or len(called) != 1 else called
    fits = [c for c, kind in split.features.items() if isinstance(kind, (ClassLabel, Value))]
    return find_columns(split, name, "--label-column", asked, found, fits)[0]


def find_columns(
    split: "Dataset",
    name: str,
    flag: str,
    asked: Any,
    found: list[str],
    fits: list[str],
    most: int = 1,
) -> list[str]:
    """Return the columns that a flag names, one or several, or else those found.

    A `UserError`: there is none, they are too many, or one is not of those that fit by type.
    """
    there = ", ".join(
        f"{column} ({type(kind).__name__})" for column, kind in split.features.items()
    )
    columns = [asked] if isinstance(asked, str) else [*(asked or found)]
    for column in columns:
        if column not in fits:
            held = "another type there" if column in split.features else "no such column"
            raise UserError(f"{flag} {column}: data set {name} has {held}: {there}")
    if not 1 <= len(columns) <= most:
        count, few = len(columns) or "no", "one" if most == 1 else f"one to {most}"
        raise UserError(f"data set {name} has {count} columns for {flag}, name {few}: {there}")
    return columns


def find_classes(values: set[Any], where: str) -> list[Any]:
    """Return the values that stand for classes in order, numbers before text."""
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise UserError(f"{where} holds real numbers, no classes: name another: --label-column")
    if not all(isinstance(value, (str, int, float)) for value in values):
        raise UserError(f"{where} holds neither text nor whole numbers")
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def hold_out(raw: RawData, share: float) -> None:
    """Move a deterministic `share` of train to validation: rows at even distances by class."""
    train, labels = raw.splits["train"], raw.labels["train"]
    count = max(1, round(share * len(labels)))
    order = np.random.default_rng(0).permutation(len(labels))
    # The only row of a class is one to learn from.
    several = order[np.bincount(labels)[labels[order]] > 1]
    by_class = several[labels[several].argsort(kind="stable")] if len(several) else order
    if count >= len(by_class):
        raise UserError("the data set has too few rows to hold some out: add a validation split")
    held = by_class[((np.arange(count) + 0.5) * len(by_class) / count).astype(int)]
    is_held = np.isin(np.arange(len(labels)), held)
    for split, chosen in (("train", ~is_held), ("validation", is_held)):
        raw.splits[split] = train.select(np.flatnonzero(chosen))
        raw.labels[split] = labels[chosen]
    raw.notes.append(f"held out {count:,} of {len(labels):,} rows of train for validation")
