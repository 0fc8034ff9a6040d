"""Parquet files streamed in training: the samples of prepared data, in an order by blocks."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value

from common.data.images import StreamedImages, load_images
from common.data.loader import Loader
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.sources import DataSource, find_named
from common.data.streaming import parquet_rows
from common.data.text import load_text
from common.errors import UserError
from tests.local_data import grey_images, sentences, write_csv, write_image_parquet
from tests.unit.data.loading import refusal

GROUP = 20  # rows
IMAGES = Features({"image": Image(), "label": ClassLabel(names=["a", "b", "c"])})


def write_images(folder: Path, name: str, count: int, seed: int = 0, **columns: Any) -> None:
    """Write a shard of row groups of 20."""
    write_rows(folder / f"{name}.parquet", grey_images(count, seed) | columns, IMAGES)


def write_rows(path: Path, columns: dict[str, Any], features: Features) -> None:
    """Write a file of row groups of 20."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(columns, features=features).to_parquet(path, batch_size=GROUP)


def images_folder(folder: Path) -> Path:
    """Write three shards of training images, and one of test images."""
    for shard, count in enumerate((95, 40, 68)):
        write_images(folder, f"train-{shard}", count, shard)
    write_images(folder, "test-0", 41, 9)
    return folder


def source_of(folder: Path, streaming: bool = True, **changes: Any) -> DataSource:
    """Return the source of a folder, with `--streaming` unless told otherwise."""
    place = find_named(str(folder), None)
    return DataSource(**{**vars(place), "streaming": streaming, **changes})


def images(source: DataSource, **changes: Any) -> Any:
    """Load images as the recipes do."""
    columns = {"image_size": None, "image_column": None, "label_column": None}
    return load_images(source, **{**columns, "dtype": torch.float32, **changes})


def every_batch(samples: Any, workers: int = 0, world: int = 1) -> list[Any]:
    """Return the evaluation's batches of all ranks."""
    order = EvaluationOrder(len(samples), 16, world, 0, blocks=samples.blocks, lengths=None)
    loader = Loader(samples, order, torch.device("cpu"), num_workers=workers, placement="auto")
    with contextlib.closing(loader):
        return [*loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_images_equal_prepared_ones(tmp_path: Path, workers: int) -> None:
    """So do class names, sizes, and the mean and deviation of pixels."""
    folder = images_folder(tmp_path / "data")
    prepared = images(source_of(folder, False))
    streamed = images(source_of(folder))
    assert isinstance(streamed.splits["train"], StreamedImages)
    assert streamed.class_names == prepared.class_names
    assert streamed.image_format == prepared.image_format
    assert streamed.facts().sizes == prepared.facts().sizes == {"train": 203, "test": 41}
    for name in ("train", "test"):
        assert streamed.splits[name].num_bytes is None
        expected_batches = every_batch(prepared.splits[name], workers)
        streamed_batches = every_batch(streamed.splits[name], workers)
        for batch, expected in zip(streamed_batches, expected_batches, strict=True):
            assert torch.equal(batch["images"], expected["images"])
            assert torch.equal(batch["labels"], expected["labels"])


def test_streamed_text_equals_prepared_text(tmp_path: Path) -> None:
    """Tokens, labels, vocabulary and the work of each batch are the same."""
    columns = sentences(1, 0)
    features = Features({name: Value("string") for name in columns})
    for name, count in (("train", 107), ("test", 33)):
        write_rows(tmp_path / "data" / f"{name}.parquet", sentences(count, 3), features)
    loaded = []
    for streaming in (False, True):
        columns: dict[str, Any] = {"text_columns": (), "label_column": None}
        source = source_of(tmp_path / "data", streaming)
        loaded.append(load_text(source, checkpoint="scratch", max_length=32, **columns))
    prepared, streamed = loaded
    assert streamed.class_names == prepared.class_names == ["animals", "colours", "numbers"]
    assert streamed.vocabulary_size == prepared.vocabulary_size
    rows = torch.arange(7, 31)
    split = streamed.splits["train"]
    assert split.has_tokens
    assert split.lengths is None
    expected = prepared.splits["train"].read(rows, 0)
    first = split.finish(split.read(rows, 0), rows, 0)
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in expected)
    other_rows = torch.arange(31, 40)
    other = split.finish(split.read(other_rows, 0), other_rows, 0)
    for batch, batch_rows in ((first, rows), (other, other_rows)):
        expected_work = prepared.splits["train"].work_by_index(batch_rows)
        assert split.work_of(batch, batch_rows) == expected_work, "of each batch, in any order"


def test_file_that_changes_during_training_is_refused(tmp_path: Path) -> None:
    """The order of samples was made for other rows."""
    samples = images(source_of(images_folder(tmp_path / "data"))).splits["test"]
    shutil.copy(tmp_path / "data" / "train-0.parquet", tmp_path / "data" / "test-0.parquet")
    with pytest.raises(
        UserError,
        match=r"test-0\.parquet has changed since the run began: restore this file as it was",
    ):
        samples.read(torch.arange(4), 0)


def test_duplicate_columns_are_refused_and_string_views_are_read(tmp_path: Path) -> None:
    """Other programs write text as string views."""
    labels = pa.array(["a", "b"] * 20)
    texts = pa.array(["one two", "three"] * 20)
    views = texts.cast(pa.string_view())
    tables = {
        "twice": pa.Table.from_arrays([texts, texts, labels], names=["text", "text", "label"]),
        "views": pa.Table.from_arrays([views, labels], names=["text", "label"]),
    }
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "train.parquet", row_group_size=GROUP)
    flags: dict[str, Any] = {"checkpoint": "scratch", "text_columns": (), "label_column": None}
    for streaming in (True, False):
        twice, views = (source_of(tmp_path / name, streaming) for name in tables)
        message = refusal(lambda: load_text(twice, max_length=8, **flags))  # noqa: B023
        assert "train.parquet" in message
        assert len(load_text(views, max_length=8, **flags).splits["train"]) in (GROUP, 36)


def test_row_groups_are_read_once_and_few_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of two reads about half of the row groups in an epoch."""
    for shard in range(4):
        write_images(tmp_path / "data", f"train-{shard}", 200, shard)
    write_images(tmp_path / "data", "test-0", 20)
    rows = images(source_of(tmp_path / "data")).splits["train"].rows
    monkeypatch.setattr(parquet_rows, "CACHE_BYTES", 4 * int(rows.groups[:, 3].mean()))
    rows = parquet_rows.ParquetRows(rows.groups, rows.shards, rows.columns, [*rows.class_numbers])
    assert rows.blocks.at_once == 4
    read_blocks = list[int]()
    original = parquet_rows.ParquetRows.table

    def table(self: Any, block: int) -> Any:
        read_blocks.extend([block] if block not in self.cached_tables else [])
        return original(self, block)

    monkeypatch.setattr(parquet_rows.ParquetRows, "table", table)
    order = TrainingOrder(len(rows), 8, 1, 2, 1, 0, blocks=rows.blocks)
    for indices in order.micro_batches(0):
        rows.read(indices, 0)
        assert len(rows.cached_tables) <= 4
    # Two lanes have twenty row groups each, and a lane may end within one more.
    assert 20 <= len({*read_blocks}) <= len(read_blocks) <= 22


def test_row_groups_are_held_out(tmp_path: Path) -> None:
    """Without a validation or test split, whole row groups of train become validation."""
    write_images(tmp_path / "data", "train-0", 200)
    data = images(source_of(tmp_path / "data", validation_share=0.2))
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 160,
        "validation": 40,
    }
    groups = np.concatenate([split.rows.groups for split in data.splits.values()])
    assert sorted(groups[:, 1]) == [*range(10)]
    assert "held out 2 of 10 row groups" in data.notes[0]


def test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    """The test splits of GLUE have -1 for every label."""
    write_images(tmp_path / "data", "train-0", 60)
    write_images(tmp_path / "data", "validation-0", 20)
    write_images(tmp_path / "data", "test-0", 20, label=[-1] * 20)
    assert [*images(source_of(tmp_path / "data")).splits] == ["train", "validation"]


def test_fingerprint_depends_on_the_contents(tmp_path: Path) -> None:
    """Files of the same size still have different fingerprints."""
    fingerprints = set()
    for seed in (0, 1, 0):
        folder = tmp_path / f"{len(fingerprints)}"
        write_images(folder, "train-0", 60, seed)
        fingerprints.add(images(source_of(folder)).fingerprint)
    assert len(fingerprints) == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("column", "missing"),
    [("image", "value"), ("label", "label (a -1 or NaN counts as none)")],
)
def test_row_without_a_value_is_refused_when_read(
    tmp_path: Path, column: str, missing: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sentence appears with and without workers."""
    columns = grey_images(60, 0)
    columns[column][55] = None
    write_images(tmp_path / "data", "train-0", 60, **{column: columns[column]})
    write_images(tmp_path / "data", "test-0", 20)
    monkeypatch.setattr("common.data.image_decoding.preparation.SAMPLED_IMAGES", 1)
    split = images(source_of(tmp_path / "data")).splits["train"]
    message = refusal(lambda: every_batch(split, workers))
    assert f"train-0.parquet contains a row without a {missing} in column {column}" in message
    assert "or pass --no-streaming, which skips them" in message


def test_label_without_a_class_is_refused_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then, a run has begun: the fingerprint forbids a resume with corrected data."""
    write_images(tmp_path / "data", "test-0", 20)
    path = tmp_path / "data" / "train-0.parquet"
    write_images(path.parent, path.stem, 60)
    table = pq.read_table(path)
    place = table.schema.get_field_index("label")
    labels = pa.array([*table["label"].to_pylist()[:-1], 7])
    table = table.set_column(place, table.schema.field("label"), labels)
    pq.write_table(table, path, row_group_size=GROUP)
    monkeypatch.setattr("common.data.image_decoding.preparation.SAMPLED_IMAGES", 1)
    split = images(source_of(tmp_path / "data")).splits["train"]
    message = refusal(lambda: every_batch(split))
    assert "a row with the label 7 in column label, which is none of the 3 classes" in message
    assert "correct this label in the data (in a local copy" in message
    assert "and start another run" in message


def test_data_that_cannot_be_streamed_are_refused(tmp_path: Path) -> None:
    """Other formats, shards with different columns and too few row groups are refused."""
    columns = sentences(30, 0)
    write_csv(tmp_path / "csv" / "train.csv", columns)
    message = refusal(lambda: images(source_of(tmp_path / "csv")))
    assert "csv files: pass --no-streaming, or convert" in message
    write_images(tmp_path / "odd", "train-0", 40)
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    write_rows(tmp_path / "odd" / "train-1.parquet", grey_images(40, 0, classes=2), features)
    assert "have different columns" in refusal(lambda: images(source_of(tmp_path / "odd")))
    single_class = grey_images(40, 0)
    single_class["label"] = [0] * 40
    write_image_parquet(tmp_path / "cats", {"train": single_class}, names=("cat",))
    assert "all rows of split train of data set cats have the same label" in refusal(
        lambda: images(source_of(tmp_path / "cats"))
    )
    empty: dict[str, list[Any]] = {"image": [], "label": []}
    write_image_parquet(tmp_path / "gap", {"train": grey_images(40, 0), "test": empty})
    assert (
        "split test of data set gap is empty: add rows to the files of this split, or"
        in refusal(lambda: images(source_of(tmp_path / "gap")))
    )
    write_images(tmp_path / "one", "train-0", GROUP)
    message = refusal(lambda: images(source_of(tmp_path / "one")))
    assert (
        "1 of the 1 row groups of train in data set one can't be held out for validation" in message
    )
    assert "write the parquet files with more row groups, or pass --no-streaming" in message
    write_images(tmp_path / "cut", "train-0", 40)
    shard = tmp_path / "cut" / "train-0.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    refusal(lambda: images(source_of(tmp_path / "cut")))
