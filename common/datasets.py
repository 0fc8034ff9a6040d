"""Read a data set: its columns, classes, labels and splits.

`datasets` is imported only when something is read: a start on cached data never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import UserError
from common.sources import BUILT_IN, DataSource

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

VALIDATION_NAMES = ("validation", "valid", "val", "dev", "validation_matched")
LABEL_NAMES = ("label", "labels", "class", "target", "category")


@dataclass
class RawData:
    """Labelled splits of a data set as `datasets.Dataset`s, and the classes' names."""

    splits: dict[str, Dataset]
    labels: dict[str, np.ndarray]  # split -> int64 [rows]
    class_names: list[str]
    label_column: str
    notes: list[str] = field(default_factory=list)


def load_raw(source: DataSource, label_column: str | None) -> RawData:
    """Read all labelled splits of a data set.

    Rows without a label are dropped, and said; a split without any label is left out. Without a
    validation split, a deterministic, stratified share of `train` is held out: what the source
    asks for, or else 10 % if there is no test split either.

    Raises:
        UserError: for a data set that can't be read or can't be trained on.
    """
    dataset = load_splits(source)
    train_name = "train" if "train" in dataset else next(iter(dataset))
    label = find_label_column(dataset[train_name], label_column, source.name)
    raw = RawData({}, {}, [], label)
    columns: dict[str, tuple[Dataset, list[Any]]] = {}
    for name, split in dataset.items():
        role = "train" if name == train_name else str(name)
        role = "validation" if role in VALIDATION_NAMES else role
        if (
            role not in ("train", "validation", "test")
            or role in columns
            or label not in split.column_names
        ):
            continue
        values = split[label][:]
        kept = [
            row
            for row, value in enumerate(values)
            if value not in (None, "", -1) and value == value
        ]
        if len(kept) < len(values):
            raw.notes.append(
                f"{role}: {len(values) - len(kept):,} of {len(values):,} rows have no label"
            )
        if kept:
            columns[role] = (split.select(kept), [values[row] for row in kept])
    if "train" not in columns:
        raise UserError(
            f"data set {source.name}: split {train_name} has no labelled row in column {label}: "
            "check the data, or name another with --label-column"
        )
    encode = label_encoder(dataset[train_name].features[label], columns, raw, source.name, label)
    for role, (split, values) in columns.items():
        raw.splits[role] = split
        raw.labels[role] = np.array([encode[value] for value in values], dtype=np.int64)
    present = len(np.unique(raw.labels["train"]))
    if present < 2:
        raise UserError(
            f"data set {source.name}: all rows of train have one label: classification needs two"
        )
    share = source.validation_share or (0.1 if len(raw.splits) == 1 else None)
    if share is not None and "validation" not in raw.splits:
        hold_out(raw, share)
    note_majority(raw)
    return raw


def note_majority(raw: RawData) -> None:
    """Note what always guessing the most frequent class would reach: the least to beat."""
    majority = np.bincount(raw.labels["train"]).argmax()
    evaluated = "test" if "test" in raw.labels else "validation"
    share = (raw.labels[evaluated] == majority).mean()
    raw.notes.append(f"always guessing {raw.class_names[majority]}: {share:.1%} of {evaluated}")


def load_splits(source: DataSource) -> DatasetDict:
    """Read a data set with `datasets`, or make a built-in one.

    Raises:
        UserError: naming the data set, the damaged file if one is found, and what to do.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    if source.location in BUILT_IN:
        from common import built_in

        return built_in.LOADERS[source.location]()
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(source.location, source.configuration)
    except (DatasetGenerationError, DatasetNotFoundError, OSError, ValueError) as problem:
        damaged = damaged_parquet(Path(source.location))
        cause = problem.__cause__ or problem
        said = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UserError(
            f"data set {source.location} can't be read"
            + (f", its file {damaged} is damaged: fetch it again" if damaged else f": {said[0]}")
        ) from None
    empty = [str(name) for name, split in loaded.items() if split.num_rows == 0]
    if empty:
        raise UserError(
            f"data set {source.location}: split {', '.join(empty)} is empty: remove or fill it"
        )
    return loaded


def damaged_parquet(folder: Path) -> Path | None:
    """Return the first parquet file under `folder` that can't be read through, if any."""
    import pyarrow
    import pyarrow.parquet

    for path in sorted(folder.rglob("*.parquet")) if folder.is_dir() else []:
        try:
            for _ in pyarrow.parquet.ParquetFile(path).iter_batches():
                pass
        except (pyarrow.ArrowException, OSError):
            return path
    return None


def find_label_column(split: Dataset, asked: str | None, name: str) -> str:
    """Return the column of the labels: named, of type ClassLabel, or called as one.

    Raises:
        UserError: when it is not there or can't be decided.
    """
    from datasets import ClassLabel

    if asked is not None:
        return existing_column(split, asked, "--label-column", name)
    by_type = [column for column, kind in split.features.items() if isinstance(kind, ClassLabel)]
    by_name = [column for column in split.column_names if column.lower() in LABEL_NAMES]
    for found in (by_type, by_name):
        if len(found) == 1:
            return found[0]
    raise UserError(
        f"data set {name}: can't tell which column is the label: "
        f"name one with --label-column: {', '.join(by_type or split.column_names)}"
    )


def existing_column(split: Dataset, column: str, flag: str, name: str) -> str:
    """Return `column` if the split has it, else raise a `UserError` that lists what there is."""
    if column not in split.column_names:
        raise UserError(
            f"{flag} {column}: data set {name} has no such column: {', '.join(split.column_names)}"
        )
    return column


def label_encoder(
    feature: Any,
    columns: dict[str, tuple[Dataset, list[Any]]],
    raw: RawData,
    name: str,
    label: str,
) -> dict[Any, int]:
    """Return the map from a label's value to its class, and set `raw.class_names`."""
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        raw.class_names = list(feature.names)
        return {index: index for index in range(feature.num_classes)}
    values = {value for _, split_values in columns.values() for value in split_values}
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise UserError(
            f"data set {name}: column {label} holds real numbers, not classes: "
            "name another with --label-column"
        )
    if not all(isinstance(value, (str, int, float)) for value in values):
        raise UserError(f"data set {name}: column {label} holds neither text nor whole numbers")
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    raw.class_names = [str(int(v)) if isinstance(v, float) else str(v) for v in ordered]
    return {value: index for index, value in enumerate(ordered)}


def hold_out(raw: RawData, share: float) -> None:
    """Move a deterministic, stratified `share` of train to validation.

    Raises:
        UserError: when there are too few rows to hold one out.
    """
    labels = raw.labels["train"]
    order = np.random.default_rng(0).permutation(len(labels))
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        held[rows[: round(share * len(rows))]] = True
    if held.sum() < share * len(labels) / 2:  # many small classes: rows at even distances, then
        by_class = order[np.argsort(labels[order], kind="stable")]
        by_class = by_class[np.bincount(labels)[labels[by_class]] > 1]
        shares = np.floor(np.arange(len(by_class) + 1) * share + 0.5)
        held[by_class[np.diff(shares) > 0]] = True
    if not held.any():
        held[order[0]] = len(labels) > 1
    if not held.any() or held.all():
        raise UserError("the data set has too few rows to hold some out: add a validation split")
    train = raw.splits["train"]
    raw.splits |= {
        "train": train.select(np.flatnonzero(~held)),
        "validation": train.select(np.flatnonzero(held)),
    }
    raw.labels |= {"train": labels[~held], "validation": labels[held]}
    raw.notes.append(f"held out {held.sum():,} of {held.size:,} rows of train for validation")
