"""Labels: what counts as missing, and that streamed data have the labels of data read whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Features, Image, Value

from common.data.labelled_data.labels import is_missing_label
from common.data.reading.tables import Tables
from common.data.sources import DataSource, find_named
from common.data.streaming.parquet_rows import ParquetRows
from common.data.streaming.parquet_tables import ParquetTables
from common.errors import UserError
from tests.conftest import first
from tests.local_data import grey_images, write_parquet

NAN = float("nan")
ADVICE = "remove such rows, or pass --no-streaming, which skips them; either way, start another run"
README = """---
dataset_info:
  features:
  - name: {content}
    dtype: {dtype}
  - name: label
    dtype:
      class_label:
        names:
          '0': a
          '1': b
          '2': c
---
"""


@dataclass(frozen=True)
class LabelColumn:
    """A type of label column, and the values that it may have."""

    feature: Any  # as the files state it
    present: tuple[Any, ...]
    missing: tuple[Any, ...]
    has_readme: bool = False  # whether README.md states the type ClassLabel


CLASSES = ClassLabel(names=["a", "b", "c"])
COLUMNS = {
    "whole numbers": LabelColumn(Value("int64"), (-1, 0, 1, 7), (None,)),
    "small numbers": LabelColumn(Value("int8"), (-1, 1), (None,)),
    "real numbers that are whole": LabelColumn(Value("float64"), (-1.0, 0.0, 2.0), (None, NAN)),
    "targets of a regression": LabelColumn(Value("float32"), (-1.0, 0.5, 2.0), (None, NAN)),
    "texts": LabelColumn(Value("string"), ("-1", "a", "b"), ("", None)),
    "truth values": LabelColumn(Value("bool"), (False, True), (None,)),
    "class labels": LabelColumn(CLASSES, (0, 1, 2), (-1, None)),
    "numbers of stated classes": LabelColumn(
        Value("int64"), (0, 1, 2), (-1, None), has_readme=True
    ),
    "names of stated classes": LabelColumn(
        Value("string"), ("c", "a", "b"), (None,), has_readme=True
    ),
}


@pytest.mark.parametrize("label", [None, NAN, ""])
@pytest.mark.parametrize("is_typed", [False, True])
def test_missing_label_in_any_column(label: Any, is_typed: bool) -> None:
    """An empty cell has None, NaN or an empty text."""
    assert is_missing_label(label, is_typed)


@pytest.mark.parametrize("label", [0, 1, -2, 0.0, False, True, "-1", "none"])
@pytest.mark.parametrize("is_typed", [False, True])
def test_other_values_are_labels(label: Any, is_typed: bool) -> None:
    """Only -1 depends on the type of the column."""
    assert not is_missing_label(label, is_typed)


def test_minus_one_is_missing_only_among_class_labels() -> None:
    """In a column of plain numbers, it may be a class."""
    for label in (-1, -1.0):
        assert is_missing_label(label, is_typed=True)
        assert not is_missing_label(label, is_typed=False)


def draw_splits(column: LabelColumn, random: np.random.Generator) -> dict[str, list[list[Any]]]:
    """Return the labels of each file of each split.

    Validation has all labels, so nothing is held out. Of the other files, some have all labels,
    some have none, and some lack a few.
    """
    splits: dict[str, list[list[Any]]] = {"validation": [[*column.present]]}
    for split in ("train", "test"):
        splits[split] = []
        for _ in range(random.integers(1, 4)):
            share_of_missing = random.choice([0, 0, 0.3, 1])
            rows = range(random.integers(2, 6))
            is_missing = [random.random() < share_of_missing for _ in rows]
            splits[split].append(
                [
                    drawn_from(column.missing if gap else column.present, random)
                    for gap in is_missing
                ]
            )
    # Only data that are read as a whole are refused because train has a single class.
    if not all(is_without_label(column, label) for file in splits["train"] for label in file):
        splits["train"].append([*column.present])
    return splits


def drawn_from(values: tuple[Any, ...], random: np.random.Generator) -> Any:
    """Return one of the values, with its own type and not NumPy's."""
    return values[random.integers(len(values))]


def is_without_label(column: LabelColumn, label: Any) -> bool:
    """Whether a value is one of the missing ones."""
    return label not in column.present


def write_splits(
    folder: Path, content: str, column: LabelColumn, splits: dict[str, list[list[Any]]]
) -> DataSource:
    """Write each file of each split, with one image or one text beside each label."""
    content_type = Image() if content == "image" else Value("string")
    features = Features({content: content_type, "label": column.feature})
    for split, files in splits.items():
        for number, labels in enumerate(files):
            images = grey_images(len(labels), 0)["image"]
            texts = [f"row {row}" for row in range(len(labels))]
            columns = {content: images if content == "image" else texts, "label": labels}
            write_parquet(folder / f"{split}-{number}.parquet", columns, features)
    if column.has_readme:
        dtype = "image" if content == "image" else "string"
        (folder / "README.md").write_text(README.format(content=content, dtype=dtype))
    place = find_named(str(folder), None)
    return DataSource(**vars(place))


def labels_read_whole(source: DataSource) -> tuple[list[str], dict[str, list[int]]]:
    """Return the classes, and the class numbers of each split, of data that are read as a whole."""
    table = Tables(source, "label")
    return table.class_names, {role: labels.tolist() for role, labels in table.labels.items()}


def streamed_labels(
    source: DataSource, content: str
) -> tuple[list[str], dict[str, list[int] | str]]:
    """Return the same of streamed data; for a split with a row that is refused, the message."""
    table = ParquetTables(replace(source, streaming=True), "label")
    labels: dict[str, list[int] | str] = {}
    for role, groups in table.splits.items():
        rows = ParquetRows(groups, table.shards, [content, "label"], table.classes)
        labels[role] = or_refusal(partial(read_labels, rows))
    return table.class_names, labels


def read_labels(rows: ParquetRows) -> list[int]:
    """Return the class numbers of all rows."""
    _, labels = rows.read(torch.arange(len(rows)), None)
    return labels.tolist()


def or_refusal(load: Callable[[], Any]) -> Any:
    """Return what a function returns, or the message of its error."""
    try:
        return load()
    except UserError as error:
        return error.message


@pytest.mark.parametrize("content", first(1, ["text", "image"]))
@pytest.mark.parametrize("name", COLUMNS)
def test_streamed_labels_are_those_of_data_read_whole(
    name: str, content: str, tmp_path: Path
) -> None:
    """The splits and classes are the same. A row without a label is left out or refused."""
    column = COLUMNS[name]
    for seed in range(3):
        splits = draw_splits(column, np.random.default_rng(seed))
        source = write_splits(tmp_path / f"{seed}", content, column, splits)
        whole = or_refusal(partial(labels_read_whole, source))
        streamed = or_refusal(partial(streamed_labels, source, content))
        if isinstance(whole, str) or isinstance(streamed, str):
            assert whole == streamed, splits
            continue
        whole_classes, whole_labels = whole
        streamed_classes, labels_of_splits = streamed
        assert whole_classes == streamed_classes, splits
        assert whole_labels.keys() == labels_of_splits.keys(), splits
        for role, labels in labels_of_splits.items():
            values = [label for file in splits[role] for label in file]
            if any(is_without_label(column, value) for value in values):
                assert "contains a row without a label (a -1 or NaN counts as none)" in labels
                assert f"in column label: {ADVICE}" in labels
            else:
                assert labels == whole_labels[role], splits


def test_classes_stated_by_a_readme_need_no_types_in_the_files(tmp_path: Path) -> None:
    """So -1 is no class. Names in the files stand for the numbers of the classes."""
    splits = {"train": [[0, 1, -1]], "validation": [[2]]}
    column = COLUMNS["numbers of stated classes"]
    numbers = streamed_labels(write_splits(tmp_path / "numbers", "text", column, splits), "text")
    assert numbers[0] == ["a", "b", "c"]
    assert "row without a label" in numbers[1]["train"]
    assert numbers[1]["validation"] == [2]
    named = {"train": [["c", "a"]], "validation": [["b"]]}
    column = COLUMNS["names of stated classes"]
    names = streamed_labels(write_splits(tmp_path / "names", "text", column, named), "text")
    assert names == (["a", "b", "c"], {"train": [2, 0], "validation": [1]})
