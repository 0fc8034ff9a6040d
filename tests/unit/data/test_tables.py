"""Splits, labels and classes of local data: read correctly, or refused in one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.data.reading import built_in
from common.data.reading.tables import Tables
from common.data.sources import find_named
from tests.local_data import (
    grey_images,
    sentences,
    write_csv,
    write_image_folder,
    write_image_parquet,
    write_parquet,
)
from tests.unit.data.loading import images, refusal, text


def test_validation_share_leaves_the_test_split_alone(tmp_path: Path) -> None:
    """`--validation-share` holds out rows of train only."""
    splits = {"train": grey_images(60, 1), "test": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    sizes = []
    tests = []
    for share in (None, 0.25):
        raw = Tables(dataclasses.replace(source, validation_share=share), None)
        sizes.append({name: len(split) for name, split in raw.splits.items()})
        tests.append(raw.labels["test"].tolist())
        assert {name: len(labels) for name, labels in raw.labels.items()} == sizes[-1]
    assert sizes == [{"train": 60, "test": 10}, {"train": 45, "test": 10, "validation": 15}]
    assert tests[0] == tests[1]


def test_validation_share_leaves_a_validation_split_alone(tmp_path: Path) -> None:
    """Nothing is added to the data set's own validation split, and a note says so."""
    splits = {"train": grey_images(60, 1), "validation": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    raw = Tables(dataclasses.replace(source, validation_share=0.5), None)
    assert {name: len(split) for name, split in raw.splits.items()} == {
        "train": 60,
        "validation": 10,
    }
    assert "nothing is held out by --validation-share: there is a validation split" in raw.notes


def test_too_few_rows_to_hold_out_name_the_label_column(tmp_path: Path) -> None:
    """A label column of texts that rarely repeat leaves few rows, unlike the data set's size."""
    titles = [f"title {number}" for number in range(96)] + ["other"] * 4
    columns = {"text": ["word"] * 100, "title": titles}
    write_csv(tmp_path / "data" / "train.csv", columns)
    source = find_named(str(tmp_path / "data"), None)
    message = refusal(lambda: Tables(source, "title"))
    assert "10 of the 100 rows of train in data set data can't be held out" in message
    assert "check --label-column (it is title), or pass a smaller --validation-share" in message


def test_string_labels_become_sorted_classes(tmp_path: Path) -> None:
    """A split called `valid` is the validation split, and one called `extra` is ignored."""
    from datasets import Features, Value
    from datasets import Image as ImageType

    features = Features({"picture": ImageType(), "label": Value("string")})
    for seed, (split, count) in enumerate({"train": 12, "valid": 6, "extra": 3}.items()):
        columns = grey_images(count, seed)
        values = {"picture": columns["image"], "label": ["zbc"[i] for i in columns["label"]]}
        write_parquet(tmp_path / "named" / f"{split}.parquet", values, features)
    data = images(tmp_path / "named")
    assert data.class_names == ["b", "c", "z"]
    assert data.splits["train"].labels[:3].tolist() == [2, 0, 1]
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 12,
        "validation": 6,
    }


def test_integer_labels_become_classes_in_numeric_order(tmp_path: Path) -> None:
    """Integer labels become classes in numeric order without a class type."""
    from datasets import Features, Value
    from datasets import Image as ImageType

    columns = grey_images(24, 0)
    values = {"image": columns["image"], "label": [(10, 9, 100)[i] for i in columns["label"]]}
    features = Features({"image": ImageType(), "label": Value("int64")})
    write_parquet(tmp_path / "numbers" / "train.parquet", values, features)
    data = images(tmp_path / "numbers")
    assert data.class_names == ["9", "10", "100"]


def test_single_class_is_refused(tmp_path: Path) -> None:
    """The message says that there is only one label."""
    folder = write_image_folder(tmp_path / "cats", ["cat"], per_class=5)
    # `datasets` takes no class from a single folder, so a Parquet file has the labels.
    columns = grey_images(12, 0)
    columns["label"] = [1] * 12
    folder = write_image_parquet(tmp_path / "one", {"train": columns})
    message = refusal(lambda: images(folder))
    assert "have the same label" in message
    assert "one" in message


def test_empty_split_is_named(tmp_path: Path) -> None:
    """The message names the split."""
    empty: dict[str, list[Any]] = {"image": [], "label": []}
    folder = write_image_parquet(tmp_path / "gap", {"train": grey_images(12, 0), "test": empty})
    message = refusal(lambda: images(folder))
    assert "test" in message
    assert "empty" in message


def test_empty_folder_is_named(tmp_path: Path) -> None:
    """The message names the folder."""
    (tmp_path / "nothing").mkdir()
    assert "nothing" in refusal(lambda: images(tmp_path / "nothing"))


@pytest.mark.parametrize(("classes", "per_class"), [(3, 40), (50, 4), (2, 5), (3, 1)])
def test_a_tenth_is_held_out(classes: int, per_class: int, tmp_path: Path) -> None:
    """At least one row is held out, and about a tenth even of many small classes."""
    columns = sentences(classes * per_class, 0)
    columns["label"] = [f"class {index % classes}" for index in range(classes * per_class)]
    write_csv(tmp_path / "small" / "train.csv", columns)
    raw = Tables(find_named(str(tmp_path / "small"), None), None)
    held_out = len(raw.labels["validation"])
    remaining = len(raw.labels["train"])
    assert held_out + remaining == classes * per_class
    assert held_out == pytest.approx(max(1, 0.1 * classes * per_class), abs=1)


def test_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    """The message names the damaged one of several files."""
    splits = {"train": grey_images(40, 0), "validation": grey_images(9, 1)}
    folder = write_image_parquet(tmp_path / "torn", splits)
    path = folder / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(lambda: images(folder))
    assert str(path) in message
    assert "magic bytes" in message


def two_label_columns(folder: Path) -> Path:
    """Write text with two columns of class labels, neither of which is named `label`."""
    from datasets import ClassLabel, Features, Value

    columns = sentences(30, 0)
    values = {
        "sentence": columns["sentence"],
        "mood": [index % 2 for index in range(30)],
        "topic": [index % 3 for index in range(30)],
    }
    moods = ClassLabel(names=["bad", "good"])
    topics = ClassLabel(names=["a", "b", "c"])
    features = Features({"sentence": Value("string"), "mood": moods, "topic": topics})
    write_parquet(folder / "train.parquet", values, features)
    return folder


def test_two_label_columns_need_a_flag(tmp_path: Path) -> None:
    """The message names the flag and both columns, and the flag decides."""
    folder = two_label_columns(tmp_path / "both")
    message = refusal(lambda: text(folder))
    assert "--label-column" in message
    assert "mood" in message
    assert "topic" in message
    assert text(folder, label_column="topic").class_names == ["a", "b", "c"]
    assert text(folder, label_column="mood").class_names == ["bad", "good"]
    message = refusal(lambda: text(folder, label_column="moood"))
    assert "moood" in message
    assert "mood" in message.replace("moood", "")


def test_real_numbers_are_refused_as_labels(tmp_path: Path) -> None:
    """The message names the flag that selects another column."""
    columns: dict[str, list[Any]] = dict(sentences(20, 0))
    columns["label"] = [index / 7 for index in range(20)]
    write_csv(tmp_path / "scores" / "train.csv", columns)
    message = refusal(lambda: text(tmp_path / "scores"))
    assert "label" in message
    assert "--label-column" in message


def test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    """The test splits of GLUE have -1 for every label, so validation is reported."""
    from datasets import ClassLabel, Features, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    for seed, (split, count) in enumerate({"train": 30, "validation": 8, "test": 6}.items()):
        texts = sentences(count, seed)["sentence"]
        labels = [-1] * count if split == "test" else [index % 2 for index in range(count)]
        write_parquet(
            tmp_path / "glue" / f"{split}.parquet", {"sentence": texts, "label": labels}, features
        )
    data = text(tmp_path / "glue")
    assert set(data.splits) == {"train", "validation"}
    assert any("test" in note and "6 of 6" in note for note in data.notes)


def test_class_that_occurs_only_in_test_is_counted(tmp_path: Path) -> None:
    """A class that occurs in test only is counted, so that evaluation does not fail on it."""
    train = sentences(30, 0)
    test = sentences(9, 1)
    test["label"][0] = "weather"
    write_csv(tmp_path / "rare" / "train.csv", train)
    write_csv(tmp_path / "rare" / "test.csv", test)
    assert text(tmp_path / "rare").class_names == ["animals", "colours", "numbers", "weather"]


def test_built_in_digits_are_stratified() -> None:
    """The same fifth of the 1,797 digits is always held out, with each class in proportion."""
    raw = Tables(find_named("digits", None), None)
    assert {name: len(labels) for name, labels in raw.labels.items()} == {
        "train": 1437,
        "test": 360,
    }
    counts = np.bincount(raw.labels["test"])
    assert counts.min() >= 34
    assert counts.max() <= 38


@pytest.mark.slow
def test_built_in_docstrings_are_real_text() -> None:
    """The standard library gives six topics, stratified splits, and no paragraph twice."""
    raw = Tables(find_named("docstrings", None), None)
    assert len(raw.class_names) == 6
    texts = [line for split in raw.splits.values() for line in split["text"][:]]
    assert len(texts) == len(set(texts)) > 6500
    shares = {name: np.bincount(labels) / len(labels) for name, labels in raw.labels.items()}
    for name, share in (("train", 0.6), ("validation", 0.1), ("test", 0.3)):
        assert len(raw.labels[name]) / len(texts) == pytest.approx(share, abs=0.03)
        assert shares[name] == pytest.approx(shares["train"], abs=0.05)
        assert shares[name].min() > 0.05


def test_built_in_docstrings_tolerate_missing_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reduced standard library gives what it has, without its own tests."""
    expected = []
    for topic, modules in built_in.TOPICS.items():
        package = tmp_path / modules.split()[-1]
        (package / "test").mkdir(parents=True)
        for row in range(10):
            expected.append(f"What row {row} of {topic} does.")
            (package / f"{row}.py").write_text(f'"""{expected[-1]}"""')
            (package / "test" / f"{row}.py").write_text(f'"""Test of {expected[-1]}"""')
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    splits = built_in.docstrings()
    assert sorted(line for split in splits.values() for line in split["text"][:]) == sorted(
        expected
    )


@pytest.mark.parametrize("labels", [(-1, 1), (-1, 0, 1)])
def test_minus_one_is_a_class_among_numeric_labels(labels: tuple[int, ...], tmp_path: Path) -> None:
    """Only in a column of class labels does -1 mark rows without one, as in GLUE."""
    columns: dict[str, list[Any]] = dict(sentences(30, 0))
    columns["label"] = [labels[index % len(labels)] for index in range(30)]
    write_csv(tmp_path / "signs" / "train.csv", columns)
    raw = Tables(find_named(str(tmp_path / "signs"), None), None)
    assert raw.class_names == [str(label) for label in labels]
    assert sum(len(rows) for rows in raw.labels.values()) == 30
    assert not any("no label" in note for note in raw.notes)


def test_na_and_null_are_ordinary_values(tmp_path: Path) -> None:
    """Only an empty cell of a CSV file has no value."""
    columns = sentences(30, 0)
    columns["label"] = [("NA", "null", "EU", "")[index % 4] for index in range(30)]
    columns["sentence"][:2] = ["None", "nan"]
    write_csv(tmp_path / "regions" / "train.csv", columns)
    data = text(tmp_path / "regions")
    assert data.class_names == ["EU", "NA", "null"]
    assert sum(len(split) for split in data.splits.values()) == 23
    assert any("7 of 30 rows have no label" in note for note in data.notes)
    assert not any("no text" in note for note in data.notes)
